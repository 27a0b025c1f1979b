//! Ends other than two running QEMUs: recorded facts, images, a QEMU binary, and ends that cannot be queried.

use serde_json::Value;
use towline_lab::{BootSector, Builder, Finished, Qemu, Version, paths, require_lab, towline};

use crate::run::{WITHIN, endpoint};

fn guest() -> Builder {
    let boot_sector = BootSector { fill_mib: 1, sweep_pages: 16, ..BootSector::default() };
    let guest = Qemu::builder(Version::V10_0).memory_mib(16).cpu("Nehalem").boot_sector(boot_sector);
    guest.args(["-device", "virtio-rng-pci,addr=5"])
}

fn run(arguments: &[&str]) -> Finished {
    towline(arguments).unwrap().wait(WITHIN).unwrap()
}

/// Exit status, and the IDs of the rules with a finding.
fn check(source: &str, destination: &str) -> (i32, Vec<String>) {
    let Finished { status, stdout, stderr } = run(&["check", "--json", source, destination]);
    let report: Value = serde_json::from_str(stdout.trim()).unwrap_or_else(|_| panic!("{stdout}{stderr}"));
    let findings = report["findings"].as_array().into_iter().flatten();
    let rules = findings.filter_map(|finding| finding["rule"].as_str()).map(str::to_owned);
    (status.code().unwrap(), rules.collect())
}

/// Device states of a binary (`-dump-vmstate`).
fn dump(machine: &str) -> String {
    format!("exec:{} -nodefaults -display none -M {machine} -dump-vmstate /dev/stdout", paths::QEMU_10_0)
}

#[test]
fn recorded_facts_and_images_are_checked() {
    if !require_lab("recorded_facts_and_images_are_checked") {
        return;
    }
    let source = guest().start().unwrap();
    source.wait_counting(WITHIN).unwrap();
    let place = |name: &str| source.directory().join(name).display().to_string();
    let (facts, image) = (place("a.facts"), place("guest.img"));
    let alike = guest().incoming_defer().start().unwrap();
    let bare = Qemu::builder(Version::V10_0).memory_mib(16).cpu("Nehalem").incoming_defer().start().unwrap();

    let written = run(&["check", "--facts-out", &facts, &endpoint(&source)]);
    assert_eq!(written.status.code(), Some(0), "{}", written.stderr);
    let recorded = format!("facts:{facts}");
    assert_eq!(check(&recorded, &endpoint(&alike)).0, 0);
    let (code, rules) = check(&recorded, &endpoint(&bare));
    assert!(code == 1 && rules.contains(&"device-missing".to_owned()), "{code} {rules:?}");

    let saved = run(&["copy", "--resume", &endpoint(&source), &image]);
    assert_eq!(saved.status.code(), Some(0), "{}", saved.stderr);
    assert_eq!(check(&image, &endpoint(&alike)), (0, Vec::new()));
    let (code, rules) = check(&image, &endpoint(&bare));
    assert!(code == 1 && rules.contains(&"image-sections".to_owned()), "{code} {rules:?}");
    let refused = run(&["copy", &image, &endpoint(&bare)]);
    assert_eq!(refused.status.code(), Some(1), "{}", refused.stderr);
    assert!(refused.stderr.contains("the destination has no device with the state"), "{}", refused.stderr);
    assert!(refused.stderr.contains("at pci/05.0"), "{}", refused.stderr);

    let dumped = dump("pc-q35-10.0");
    assert_eq!(check(&image, &dumped), (0, Vec::new()));
    assert_eq!(check(&dumped, &dumped), (0, Vec::new()));
    assert_eq!(check(&image, &dump("pc-i440fx-10.0")), (1, vec!["machine-type".to_owned()]));
    // A running QEMU does not report the versions of its device states.
    assert_eq!(check(&endpoint(&source), &dumped), (4, vec!["kinds".to_owned()]));
}

#[test]
fn ends_that_cannot_be_queried_are_refused_with_a_remedy() {
    for (arguments, code, text) in [
        (["check", "facts:/nowhere/a", "facts:/nowhere/b"].as_slice(), 4, "/nowhere/a: No such file"),
        (&["check", "qmp:/nowhere/a", "qmp:/nowhere/b"], 4, "no QMP socket at /nowhere/a"),
        (
            &["check", "tcp:localhost:1", "qmp:/nowhere/b"],
            4,
            "a stream cannot be queried; record the facts there",
        ),
        (&["check", "exec:echo no facts", "null:"], 2, "null: takes any guest"),
        (&["check", "exec:echo no facts", "exec:true"], 4, "not facts"),
        (&["check", "qmp:/nowhere/a"], 2, "<DEST>"),
        (&["copy", "facts:/nowhere/a", "null:"], 2, "it is for `towline check`"),
    ] {
        let Finished { status, stderr, .. } = run(arguments);
        assert_eq!(status.code(), Some(code), "{arguments:?}: {stderr}");
        assert!(stderr.contains(text), "{arguments:?}: {stderr}");
    }
}
