//! Debian's own checks of the package.

use std::process::Command;

use anyhow::Result;

use crate::command::run as run_command;
use crate::deb;
use crate::setup::apt;

/// Tags about uploads to Debian itself: a bug that the first upload closes, and a source package.
const NOT_OURS: &str = "initial-upload-closes-no-bugs,no-manual-page";
/// Tags about the maintainer's address, which its distributor sets (`DEBEMAIL`).
const ADDRESS: &str = "bogus-mail-host,bogus-mail-host-in-debian-changelog";

/// Builds the package and has lintian check it; errors and warnings fail.
pub(super) fn run() -> Result<()> {
    apt::require(&["lintian"])?;
    let package = deb::run(std::env::var_os("TOWLINE_SOAK_DEBUG").is_some())?;
    let mut lintian = Command::new("lintian");
    lintian.args(["--allow-root", "--info", "--tag-display-limit", "0", "--fail-on", "error,warning"]);
    lintian.args(["--suppress-tags", NOT_OURS]);
    if !deb::has_maintainer() {
        println!("lintian: skipped: the maintainer's address, which DEBEMAIL would set");
        lintian.args(["--suppress-tags", ADDRESS]);
    }
    run_command(lintian.arg(&package))
}
