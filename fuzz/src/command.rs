//! Command that runs a fuzz target. Without dependencies, so other programs can include this file as a
//! module.

use std::io;
use std::path::Path;
use std::process::Command;

/// All targets, with the maximum length of their inputs.
pub const TARGETS: [(&str, u32); 14] = [
    ("main_channel", 2048),
    ("lane", 4096),
    ("return_path", 1024),
    ("device_state", 2048),
    ("mapped_ram", 1024),
    ("xbzrle", 512),
    ("colo", 8192),
    ("vhost_message", 512),
    ("vhost_session", 2048),
    ("vhost_ring", 3072),
    ("facts", 2048),
    ("command_line", 4096),
    ("net_segments", 1024),
    ("net_device", 2048),
];

/// Returns `cargo fuzz run` of a target with `runs` inputs, in the repository at `root`. It needs cargo-fuzz
/// (`cargo install cargo-fuzz --locked`) but no nightly toolchain, because it uses no sanitizer. Inputs with
/// new coverage are stored in `fuzz/corpus`, which is not under version control; a run starts from these and
/// from `fuzz/seeds`.
///
/// # Errors
/// If the directory of the corpus cannot be created.
pub fn run(root: &Path, target: &str, runs: u64) -> io::Result<Command> {
    let length_max = TARGETS.iter().find(|(name, _)| *name == target).map_or(4096, |(_, length)| *length);
    let mut command = Command::new("cargo");
    command.current_dir(root).args(["fuzz", "run", "--fuzz-dir", "fuzz", "--sanitizer", "none", target]);
    let path = |kind: &str| root.join("fuzz").join(kind).join(target);
    std::fs::create_dir_all(path("corpus"))?;
    command.args([path("corpus"), path("seeds")]);
    command.args(["--", &format!("-runs={runs}"), &format!("-max_len={length_max}"), "-rss_limit_mb=2048"]);
    Ok(command)
}
