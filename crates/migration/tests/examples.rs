//! The example VMM migrates itself as documented.
#![allow(clippy::unwrap_used, reason = "the exemption for tests does not reach their helpers")]

use std::io::Write;
use std::process::Command;

use towline_migration::tracker::WriteProtect;

#[test]
fn the_example_vmm_moves_itself() {
    if let Err(error) = WriteProtect::new() {
        let _ = writeln!(std::io::stderr(), "SKIPPED the_example_vmm_moves_itself: {error}");
        return;
    }
    // Cargo builds it beside the tests.
    let test = std::env::current_exe().unwrap();
    let program = test.ancestors().nth(2).unwrap().join("examples/vmm");
    assert!(
        program.is_file(),
        "{} is missing; `cargo build -p towline-migration --examples` makes it",
        program.display()
    );
    let output = Command::new(program).output().unwrap();
    let (said, errors) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{said}{errors}");
    let after = |text: &str| {
        let found = said.lines().find_map(|line| line.strip_prefix(text));
        found.unwrap_or_else(|| panic!("{text:?} is not in {said:?} {errors}")).to_owned()
    };
    let stopped = after("source: stopped at ");
    assert_ne!(stopped, "[0, 0]", "the guest did not run");
    assert_eq!(after("destination: continues from "), format!("{stopped}, memory is right"));
    assert_eq!(after("destination: counted on, "), "memory is right");
    after("source: the guest has arrived");
}
