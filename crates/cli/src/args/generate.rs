//! `towline completions` and `towline man`.

use std::path::PathBuf;

use clap_complete::Shell;

/// Print shell completions
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  For this user's bash:
    towline completions bash > ~/.local/share/bash-completion/completions/towline
  For every user's zsh:
    towline completions zsh > /usr/share/zsh/vendor-completions/_towline
")]
pub(crate) struct CompletionsArgs {
    /// Shell to generate for
    #[arg(value_name = "SHELL")]
    pub(crate) shell: Shell,
}

/// Write the manual pages into a directory
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  towline man /usr/local/share/man/man1 && man towline-copy
")]
pub(crate) struct ManArgs {
    /// Directory for towline.1, towline-copy.1, …; created if it does not exist
    #[arg(value_name = "DIR")]
    pub(crate) directory: PathBuf,
}
