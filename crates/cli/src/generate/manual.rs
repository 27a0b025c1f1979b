//! Manual pages, with the usual sections: the text after the options becomes ENDPOINTS, EXAMPLES and EXIT
//! STATUS.

use std::io::{self, Write as _};
use std::path::Path;

use clap::{Command, CommandFactory as _};
use clap_mangen::Man;

use crate::args::Args;

/// Section of an example or table, whose lines are kept.
const LITERAL_BEGIN: &str = ".PP\n.nf\n";
const LITERAL_END: &str = ".fi\n";
/// FILES of every page.
const FILES: &str = "\
.SH FILES
.TP
IMAGE.manifest.json
Checksums and layout of an image, beside it.
.TP
IMAGE.working-set.json
Pages that earlier restores of the image requested.
.TP
/run/towline, $XDG_RUNTIME_DIR/towline
Journals of changed QEMUs, records of undecided moves, directories of guests that were started.
.TP
/usr/share/doc/towline/docs
Guides and formats, also those that options refer to as docs/NAME.md.
";

/// Writes a page for the program and for each command.
pub(super) fn write(directory: &Path) -> io::Result<()> {
    let mut command = Args::command().disable_help_subcommand(true);
    command.build();
    let pages = pages(&command);
    let names: Vec<String> = pages.iter().map(|page| page_name(page)).collect();
    for page in &pages {
        let name = page_name(page);
        std::fs::write(directory.join(format!("{name}.1")), render(page, &names)?)?;
    }
    Ok(())
}

/// The command and all of its commands, except hidden ones.
fn pages(command: &Command) -> Vec<&Command> {
    let below = command.get_subcommands().filter(|below| !below.is_hide_set());
    [command].into_iter().chain(below.flat_map(pages)).collect()
}

fn page_name(command: &Command) -> String {
    command.get_display_name().unwrap_or(command.get_name()).to_owned()
}

fn render(command: &Command, names: &[String]) -> io::Result<Vec<u8>> {
    let name = page_name(command);
    // Of an option that -h leaves out, clap_mangen would show the name only.
    let command = &command.clone().mut_args(|argument| argument.hide_short_help(false));
    let man = Man::new(command.clone()).title(&name).manual("towline").source("");
    let mut page = Vec::new();
    man.render_title(&mut page)?;
    man.render_name_section(&mut page)?;
    synopsis(command, &mut page)?;
    man.render_description_section(&mut page)?;
    man.render_options_section(&mut page)?;
    if command.has_subcommands() {
        commands(command, &mut page)?;
    }
    let text = command.get_after_long_help().or(command.get_after_help()).map(ToString::to_string);
    sections(&text.unwrap_or_default(), &mut page)?;
    page.write_all(FILES.as_bytes())?;
    let others = names.iter().filter(|other| **other != name);
    let others: Vec<String> = others.map(|other| format!(".BR {} (1)", escape(other))).collect();
    writeln!(page, ".SH SEE ALSO\n{}", others.join(",\n"))?;
    Ok(page)
}

/// The usage of `--help`, which has every argument with its value.
fn synopsis(command: &Command, page: &mut Vec<u8>) -> io::Result<()> {
    let usage = command.clone().render_usage().to_string();
    let usage = usage.strip_prefix("Usage: ").unwrap_or(&usage).trim();
    writeln!(page, ".SH SYNOPSIS")?;
    let name = command.get_bin_name().unwrap_or(command.get_name());
    match usage.strip_prefix(name) {
        Some(rest) => writeln!(page, "\\fB{}\\fR{}", escape(name), escape(rest)),
        None => writeln!(page, "{}", escape(usage)),
    }
}

fn commands(command: &Command, page: &mut Vec<u8>) -> io::Result<()> {
    writeln!(page, ".SH COMMANDS")?;
    for below in command.get_subcommands().filter(|below| !below.is_hide_set()) {
        let about = below.get_about().map(ToString::to_string).unwrap_or_default();
        writeln!(page, ".TP\n.BR {} (1)\n{}", escape(&page_name(below)), escape(&about))?;
    }
    Ok(())
}

/// Splits a text at its headings, which are lines without indentation that end with a colon. Other lines are
/// kept.
fn sections(text: &str, page: &mut Vec<u8>) -> io::Result<()> {
    let mut is_literal = false;
    for line in text.lines() {
        let heading = line.strip_suffix(':').filter(|line| !line.starts_with(' ') && !line.is_empty());
        // A paragraph may begin with its heading.
        let paragraph = line.strip_prefix("Exit status: ");
        if (heading.is_some() || paragraph.is_some()) && is_literal {
            page.write_all(LITERAL_END.as_bytes())?;
            is_literal = false;
        }
        match (heading, paragraph) {
            (Some(heading), _) => {
                writeln!(page, ".SH {}", escape(&heading.to_uppercase()))?;
                page.write_all(LITERAL_BEGIN.as_bytes())?;
                is_literal = true;
            }
            (None, Some(text)) => writeln!(page, ".SH EXIT STATUS\n{}", escape(text))?,
            (None, None) => writeln!(page, "{}", escape(line))?,
        }
    }
    if is_literal {
        page.write_all(LITERAL_END.as_bytes())?;
    }
    Ok(())
}

/// Escapes what roff would interpret. Hyphens stay the character that can be pasted.
fn escape(text: &str) -> String {
    let text = text.replace('\\', "\\e").replace('-', "\\-");
    if text.starts_with(['.', '\'']) { format!("\\&{text}") } else { text }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(name: &str) -> String {
        let directory = tempfile::tempdir().unwrap();
        write(directory.path()).unwrap();
        std::fs::read_to_string(directory.path().join(name)).unwrap()
    }

    #[test]
    fn every_command_has_a_page_with_the_usual_sections() {
        let directory = tempfile::tempdir().unwrap();
        write(directory.path()).unwrap();
        let mut command = Args::command().disable_help_subcommand(true);
        command.build();
        let names: Vec<String> = pages(&command).into_iter().map(page_name).collect();
        assert!(names.len() >= 18 && names.contains(&"towline-store-ls".to_owned()), "{names:?}");
        for name in &names {
            let page = std::fs::read_to_string(directory.path().join(format!("{name}.1"))).unwrap();
            for section in [".SH NAME", ".SH SYNOPSIS", ".SH DESCRIPTION", ".SH FILES", ".SH SEE ALSO"] {
                assert!(page.contains(section), "{name} has no {section}");
            }
            assert!(!page.contains(".SH EXTRA"), "{name}");
        }
    }

    #[test]
    fn the_page_of_copy_has_endpoints_exit_status_and_examples_that_can_be_pasted() {
        let page = page("towline-copy.1");
        for section in [".SH ENDPOINTS", ".SH EXIT STATUS", ".SH EXAMPLES", ".SH LANES", ".SH OUTPUT"] {
            assert!(page.contains(section), "{section}");
        }
        assert!(page.contains("\\fBtowline copy\\fR [OPTIONS] <SOURCE> <DEST>..."), "{page}");
        assert!(page.contains("for zlib 0 (none) to 9 (best)"), "{page}");
        let example = "    towline copy \\-\\-resume qmp:/run/vm/a.qmp guest.img\n";
        assert!(page.contains(example), "{page}");
        // Literal text is closed before the next section.
        assert_eq!(page.matches(".nf").count(), page.matches(".fi").count());
    }

    #[test]
    fn text_is_not_interpreted() {
        assert_eq!(escape(".SH a-b\\c"), "\\&.SH a\\-b\\ec");
    }
}
