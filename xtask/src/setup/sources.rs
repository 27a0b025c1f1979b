//! Where this machine gets Debian from, and other suites of the same mirror beside it.
//!
//! apt knows two formats: stanzas (`*.sources`, deb822) and one-line entries (`sources.list`, `*.list`). Whatever
//! entry brings `main` of this machine's release is copied with other suites, so that mirror, key and options stay the
//! owner's choice.

use std::path::Path;

/// Debian 12, from which the lab's older parts come on every machine.
pub(crate) const CODENAME: &str = "bookworm";
/// The suite that has QEMU 10.0 for it.
pub(crate) const BACKPORTS: &str = "bookworm-backports";
/// Debian 13.
pub(crate) const STABLE: &str = "trixie";
/// Its backports.
pub(crate) const STABLE_BACKPORTS: &str = "trixie-backports";

const HEADER: &str = "# Written by towline's `cargo xtask setup` for QEMU 10.0; safe to delete.\n";

/// The format of a file of sources.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Format {
    /// deb822: `*.sources`.
    Stanzas,
    /// One entry a line: `*.list`.
    Lines,
}

/// A file for a directory of sources.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct SourcesFile {
    pub(crate) name: &'static str,
    pub(crate) content: String,
}

/// Entries of a sources file for the two suites of Debian 12.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Found {
    /// The backports suite is configured already.
    Backports,
    /// Debian itself is, and this file would put the backports beside it.
    Debian(SourcesFile),
    /// Neither.
    Nothing,
}

/// Reads one file of sources.
pub(crate) fn read(content: &str, format: Format) -> Found {
    let entries = entries(content, format);
    if entries.iter().any(|entry| entry.brings(BACKPORTS)) {
        return Found::Backports;
    }
    match entries.iter().find(|entry| entry.brings(CODENAME)) {
        Some(Entry::Stanza { rest, .. }) => Found::Debian(SourcesFile {
            name: "towline-backports.sources",
            content: format!(
                "{HEADER}Types: deb\nSuites: {BACKPORTS}\nComponents: main\n{}",
                fields(rest, &[])
            ),
        }),
        Some(Entry::Line { options, uri, .. }) => Found::Debian(SourcesFile {
            name: "towline-backports.list",
            content: format!("{HEADER}deb {}{uri} {BACKPORTS} main\n", bracketed(options)),
        }),
        None => Found::Nothing,
    }
}

/// A file with `suites` instead, of the same mirror and signed by the keys of `keyring`, if this one has Debian 12 or 13. Only the
/// lists of packages are fetched of them.
pub(crate) fn beside(content: &str, format: Format, suites: &[&str], keyring: &Path) -> Option<SourcesFile> {
    let is_release = |entry: &Entry| [CODENAME, STABLE].iter().any(|release| entry.brings(release));
    let entry = entries(content, format).into_iter().find(is_release)?;
    let keyring = keyring.display();
    let file = match entry {
        Entry::Stanza { rest, .. } => SourcesFile {
            name: "beside.sources",
            content: format!(
                "Types: deb\nSuites: {}\nComponents: main\nTargets: Packages\nSigned-By: {keyring}\n{}",
                suites.join(" "),
                fields(&rest, &["signed-by", "targets"])
            ),
        },
        Entry::Line { options, uri, .. } => {
            let is_ours = |option: &&String| {
                !["signed-by", "target"].contains(&option.split('=').next().unwrap_or_default())
            };
            let mut options: Vec<String> = options.iter().filter(is_ours).cloned().collect();
            options.extend([format!("signed-by={keyring}"), "target=Packages".to_owned()]);
            let options = bracketed(&options);
            let line = |suite: &&str| format!("deb {options}{uri} {suite} main\n");
            SourcesFile { name: "beside.list", content: suites.iter().map(line).collect() }
        }
    };
    Some(file)
}

/// An entry that brings binary packages of `main`.
enum Entry {
    Stanza {
        suites: Vec<String>,
        /// Its fields but for types, suites and components.
        rest: Vec<String>,
    },
    Line {
        suite: String,
        options: Vec<String>,
        uri: String,
    },
}

impl Entry {
    fn brings(&self, wanted: &str) -> bool {
        match self {
            Self::Stanza { suites, .. } => suites.iter().any(|suite| suite == wanted),
            Self::Line { suite, .. } => suite == wanted,
        }
    }
}

fn entries(content: &str, format: Format) -> Vec<Entry> {
    match format {
        Format::Stanzas => {
            let lines: Vec<&str> = content.lines().filter(|line| !line.starts_with('#')).collect();
            lines.split(|line| line.trim().is_empty()).filter_map(stanza).collect()
        }
        Format::Lines => content.lines().filter_map(one_line).collect(),
    }
}

fn stanza(lines: &[&str]) -> Option<Entry> {
    let value = |wanted: &str| -> Vec<&str> {
        let mut inside = false;
        let mut words = Vec::new();
        for line in lines {
            if line.starts_with([' ', '\t']) {
                if inside {
                    words.extend(line.split_whitespace());
                }
            } else if let Some((name, rest)) = line.split_once(':') {
                inside = name.eq_ignore_ascii_case(wanted);
                if inside {
                    words.extend(rest.split_whitespace());
                }
            }
        }
        words
    };
    let binary = value("Types").contains(&"deb") && value("Components").contains(&"main");
    if !binary || value("Enabled") == ["no"] {
        return None;
    }
    let suites = value("Suites").into_iter().map(str::to_owned).collect();
    let lines: Vec<String> = lines.iter().map(|line| (*line).to_owned()).collect();
    let rest = fields(&lines, &["types", "suites", "components"]);
    Some(Entry::Stanza { suites, rest: rest.lines().map(str::to_owned).collect() })
}

/// The lines of a stanza without the fields of these names.
fn fields(lines: &[String], without: &[&str]) -> String {
    let mut content = String::new();
    let mut left_out = false;
    for line in lines {
        let name = line.split(':').next().unwrap_or_default();
        if !line.starts_with([' ', '\t']) {
            left_out = without.contains(&name.to_ascii_lowercase().as_str());
        }
        if !left_out {
            content.push_str(line);
            content.push('\n');
        }
    }
    content
}

fn one_line(line: &str) -> Option<Entry> {
    let rest = line.split('#').next().unwrap_or_default().trim().strip_prefix("deb")?;
    if !rest.starts_with([' ', '\t', '[']) {
        return None;
    }
    let rest = rest.trim();
    let (options, rest) = match rest.strip_prefix('[').and_then(|inner| inner.split_once(']')) {
        Some((options, rest)) => (options, rest),
        None => ("", rest),
    };
    let options = options.split_whitespace().map(str::to_owned).collect();
    let mut words = rest.split_whitespace();
    let (uri, suite) = (words.next()?.to_owned(), words.next()?.to_owned());
    words.any(|component| component == "main").then_some(Entry::Line { suite, options, uri })
}

fn bracketed(options: &[String]) -> String {
    if options.is_empty() { String::new() } else { format!("[{}] ", options.join(" ")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stanza_is_copied_with_another_suite() {
        let file = "Types: deb deb-src\n# a comment\nURIs: http://mirror.example/debian\n\
                    Suites: bookworm bookworm-updates\nComponents: main contrib\nSigned-By:\n /usr/share/key.gpg\n\n\
                    Types: deb\nURIs: http://mirror.example/security\nSuites: bookworm-security\nComponents: main\n";
        let Found::Debian(made) = read(file, Format::Stanzas) else { panic!("Debian not found") };
        assert_eq!(made.name, "towline-backports.sources");
        let wanted = "Types: deb\nSuites: bookworm-backports\nComponents: main\n\
                      URIs: http://mirror.example/debian\nSigned-By:\n /usr/share/key.gpg\n";
        assert_eq!(made.content, format!("{HEADER}{wanted}"));
    }

    #[test]
    fn a_line_is_copied_with_its_options() {
        let file = "# deb http://old.example bookworm main\n\
                    deb-src http://mirror.example/debian bookworm main\n\
                    deb [arch=amd64 signed-by=/k.gpg] http://mirror.example/debian bookworm main contrib # here\n";
        let Found::Debian(made) = read(file, Format::Lines) else { panic!("Debian not found") };
        assert_eq!(made.name, "towline-backports.list");
        let wanted =
            "deb [arch=amd64 signed-by=/k.gpg] http://mirror.example/debian bookworm-backports main\n";
        assert_eq!(made.content, format!("{HEADER}{wanted}"));
    }

    #[test]
    fn backports_are_recognised_in_both_formats() {
        let stanza = "Types: deb\nURIs: http://m.example/debian\nSuites: bookworm bookworm-backports\n\
                      Components: main\n";
        assert_eq!(read(stanza, Format::Stanzas), Found::Backports);
        assert_eq!(
            read("deb http://m.example/debian bookworm-backports main\n", Format::Lines),
            Found::Backports
        );
        let disabled = format!("Enabled: no\n{stanza}");
        assert_eq!(read(&disabled, Format::Stanzas), Found::Nothing);
    }

    #[test]
    fn other_sources_are_nothing() {
        assert_eq!(read("deb http://m.example/node nodistro main\n", Format::Lines), Found::Nothing);
        assert_eq!(
            read("Types: deb\nURIs: http://m.example\nSuites: sid\nComponents: main\n", Format::Stanzas),
            Found::Nothing
        );
        assert_eq!(read("", Format::Stanzas), Found::Nothing);
        assert_eq!(read("", Format::Lines), Found::Nothing);
    }

    #[test]
    fn other_suites_are_signed_by_the_keys_given_and_bring_lists_of_packages_only() {
        let (keys, suites) = (Path::new("/keys.gpg"), [STABLE, STABLE_BACKPORTS]);
        let file = "Types: deb deb-src\nURIs: http://mirror.example/debian\n\
                    Suites: bookworm bookworm-backports\nComponents: main\nSigned-By:\n /usr/share/key.gpg\n\
                    Check-Valid-Until: no\n";
        let made = beside(file, Format::Stanzas, &suites, keys).unwrap();
        let wanted = "Types: deb\nSuites: trixie trixie-backports\nComponents: main\nTargets: Packages\n\
                      Signed-By: /keys.gpg\nURIs: http://mirror.example/debian\nCheck-Valid-Until: no\n";
        assert_eq!(made, SourcesFile { name: "beside.sources", content: wanted.into() });

        let file = "deb [arch=amd64 signed-by=/k.gpg] http://mirror.example/debian bookworm main contrib\n";
        let made = beside(file, Format::Lines, &suites, keys).unwrap();
        let line = |suite| {
            format!(
                "deb [arch=amd64 signed-by=/keys.gpg target=Packages] http://mirror.example/debian {suite} main\n"
            )
        };
        let content = suites.map(line).concat();
        assert_eq!(made, SourcesFile { name: "beside.list", content });
        let of_13 = file.replace("bookworm", STABLE);
        let back = beside(&of_13, Format::Lines, &[CODENAME], keys).unwrap();
        assert_eq!(back.content, line(CODENAME));
        let other = "deb http://m.example/node nodistro main\n";
        assert_eq!(beside(other, Format::Lines, &suites, keys), None);
    }
}
