//! Shell completions and manual pages, generated from the command line.

use std::io::{ErrorKind, Write as _};

use anyhow::{Context as _, Result};
use clap::CommandFactory as _;

use crate::args::{Args, CompletionsArgs, ManArgs};
use crate::exit::Exit;

/// Runs `completions`.
pub(crate) fn completions(args: &CompletionsArgs) -> Result<Exit> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Args::command(), "towline", &mut script);
    match std::io::stdout().write_all(&script) {
        // A reader that stops early (`| head`) is not an error.
        Err(error) if error.kind() != ErrorKind::BrokenPipe => Err(error).context("standard output"),
        _ => Ok(Exit::Done),
    }
}

/// Runs `man`.
pub(crate) fn man(args: &ManArgs) -> Result<Exit> {
    let directory = &args.directory;
    let shown = || directory.display().to_string();
    std::fs::create_dir_all(directory).with_context(shown)?;
    clap_mangen::generate_to(Args::command(), directory).with_context(shown)?;
    Ok(Exit::Done)
}

#[cfg(test)]
mod tests {
    use clap_complete::Shell;

    use super::*;

    #[test]
    fn every_command_has_a_page() {
        let directory = tempfile::tempdir().unwrap();
        man(&ManArgs { directory: directory.path().join("man") }).unwrap();
        let command = Args::command();
        let shown = command.get_subcommands().filter(|command| !command.is_hide_set());
        let names: Vec<String> = shown.map(|command| format!("towline-{}.1", command.get_name())).collect();
        assert!(names.len() >= 8, "{names:?}");
        for name in names.iter().map(String::as_str).chain(["towline.1"]) {
            let page = std::fs::read_to_string(directory.path().join("man").join(name)).unwrap();
            assert!(page.contains(".SH NAME") && page.contains(".SH SYNOPSIS"), "{name}");
        }
    }

    #[test]
    fn completions_contain_the_options() {
        for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
            let mut text = Vec::new();
            clap_complete::generate(shell, &mut Args::command(), "towline", &mut text);
            let text = String::from_utf8(text).unwrap();
            assert!(text.contains("multifd-channels") && text.contains("vsock"), "{shell}");
        }
    }
}
