//! The example prints what stock QEMU recorded.
#![allow(clippy::unwrap_used, reason = "a test")]

use std::io::Write as _;
use std::process::{Command, Stdio};

#[test]
fn stream_info_prints_a_recorded_stream() {
    // Cargo builds it beside the tests.
    let test = std::env::current_exe().unwrap();
    let program = test.ancestors().nth(2).unwrap().join("examples/stream_info");
    let packed = include_bytes!("golden/precopy-10.0.main.z");
    let stream = miniz_oxide::inflate::decompress_to_vec_zlib(packed).unwrap();

    let mut child = Command::new(program).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(&stream).unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success());
    let text = String::from_utf8(output.stdout).unwrap();
    for line in
        ["machine pc-q35-10.0", "block pc.ram: 2097152 bytes", "128 pages, 547 zero pages, 0 XBZRLE pages"]
    {
        assert!(text.lines().any(|found| found == line), "{line:?} is not in\n{text}");
    }
    assert!(text.lines().any(|line| line.starts_with("device timer 0: version 2, ")), "{text}");
}
