//! How a target is run. Depends on nothing, so that whoever runs them can include this file as a module.

use std::io;
use std::path::Path;
use std::process::Command;

/// Every target, with the longest input that is worth its time.
pub const TARGETS: [(&str, u32); 12] = [
    ("main_channel", 2048),
    ("lane", 4096),
    ("return_path", 1024),
    ("device_state", 2048),
    ("mapped_ram", 1024),
    ("xbzrle", 512),
    ("vhost_message", 512),
    ("vhost_session", 2048),
    ("vhost_ring", 3072),
    ("facts", 2048),
    ("net_segments", 1024),
    ("net_device", 2048),
];

/// `cargo fuzz run` of a target, `runs` inputs long, in the repository at `root`. It needs cargo-fuzz (`cargo install
/// cargo-fuzz --locked`) and no nightly toolchain: without a sanitizer, libFuzzer's coverage is all it takes. What it
/// finds interesting goes to `fuzz/corpus`, which is not kept; it starts from that and from `fuzz/seeds`.
///
/// # Errors
/// That the corpus's directory cannot be made.
pub fn run(root: &Path, target: &str, runs: u64) -> io::Result<Command> {
    let length_max = TARGETS.iter().find(|(name, _)| *name == target).map_or(4096, |(_, length)| *length);
    let mut command = Command::new("cargo");
    command.current_dir(root).args(["fuzz", "run", "--fuzz-dir", "fuzz", "--sanitizer", "none", target]);
    let place = |kind: &str| root.join("fuzz").join(kind).join(target);
    std::fs::create_dir_all(place("corpus"))?;
    command.args([place("corpus"), place("seeds")]);
    command.args(["--", &format!("-runs={runs}"), &format!("-max_len={length_max}"), "-rss_limit_mb=2048"]);
    Ok(command)
}
