//! Forks of guests with other memory than a block of the machine, and in other states than running.

use std::fs;

use serde_json::{Value, json};
use towline_lab::{Version, require_lab, wait_until};

use super::{assert_same_memory, written};
use crate::support::{MEMORY_MIB, MIB, Recipe, Saved, WITHIN};

/// Runs a guest with these arguments under the name `web`, after it was saved.
fn running(arguments: &str) -> Saved {
    let arguments: Vec<String> = arguments.split_whitespace().map(str::to_owned).collect();
    let saved = Saved::of(&Recipe { arguments: &arguments, ..Recipe::default() });
    saved.run(&["--name", "web", "--detach", "--share"], &saved.settings()).wait_done(WITHIN).unwrap();
    saved
}

/// Memory of two nodes, of which the guest gives a part back and takes it again. QEMU discards nothing of a file that it has open for
/// reading only, so no page becomes the image's again.
#[test]
fn a_guest_with_nodes_and_a_balloon_is_forked_byte_by_byte() {
    if !require_lab("a_guest_with_nodes_and_a_balloon_is_forked_byte_by_byte") {
        return;
    }
    let saved = running(
        "-object memory-backend-ram,id=m0,size=256M -object memory-backend-ram,id=m1,size=256M -numa node,memdev=m0,cpus=0 \
         -numa node,memdev=m1,cpus=1 -device virtio-balloon-pci,free-page-reporting=on",
    );
    let mut web = saved.agent("web");
    web.shell(&written(16), WITHIN).unwrap();
    for mib in [MEMORY_MIB - 96, MEMORY_MIB] {
        let monitor = saved.monitor("web");
        monitor.execute("balloon", json!({ "value": mib * MIB })).unwrap();
        wait_until("the balloon", WITHIN, || {
            let actual = monitor.execute("query-balloon", Value::Null)?["actual"].as_u64();
            Ok((actual == Some(mib * MIB)).then_some(()))
        })
        .unwrap();
        monitor.execute("stop", Value::Null).unwrap();
        drop(monitor);
        let name = format!("at-{mib}");
        let forked = saved.fork("web", &["--name", &name, "--paused", "--detach"]);
        assert!(forked.status.success(), "{}", forked.stderr);
        assert_same_memory(&saved, &name);
        saved.ctl(&[&name, "cont"]);
        saved.assert_is_saved_guest(&mut saved.agent(&name));
        saved.quit(&name);
        saved.ctl(&["web", "cont"]);
    }
    saved.assert_is_saved_guest(&mut web);
    saved.quit("web");
}

/// There are no checksums that the image of its forks could take.
#[test]
fn a_guest_of_an_image_without_a_manifest_has_many_forks() {
    if !require_lab("a_guest_of_an_image_without_a_manifest_has_many_forks") {
        return;
    }
    let saved = Saved::new(Version::V10_0);
    fs::remove_file(format!("{}.manifest.json", saved.image())).unwrap();
    let mut run = saved.run_with_arguments(&["--name", "web", "--share"]);
    saved.assert_runs(&mut run, "web");
    saved.agent("web").shell(&written(40), WITHIN).unwrap();
    let forked = saved.fork("web", &["--name", "fork", "--count", "8", "--detach"]);
    assert!(forked.status.success(), "{}", forked.stderr);
    saved.assert_is_saved_guest(&mut saved.agent("fork-7"));
    (0..8).for_each(|n| saved.quit(&format!("fork-{n}")));
    saved.quit("web");
    run.wait(WITHIN).unwrap();
}

#[test]
fn a_guest_with_plugged_memory_is_stored_whole_and_not_forked() {
    if !require_lab("a_guest_with_plugged_memory_is_stored_whole_and_not_forked") {
        return;
    }
    let saved = running("-m slots=2,maxmem=1G");
    let monitor = saved.monitor("web");
    let backend = json!({ "qom-type": "memory-backend-ram", "id": "plugged", "size": 128 * MIB });
    monitor.execute("object-add", backend).unwrap();
    let dimm = json!({ "driver": "pc-dimm", "id": "dimm0", "memdev": "plugged" });
    monitor.execute("device_add", dimm).unwrap();
    drop(monitor);
    let refused = saved.fork("web", &["--name", "fork", "--detach"]);
    assert_eq!(refused.status.code(), Some(1), "{}", refused.stderr);
    assert!(refused.stderr.contains("memory was plugged"), "{}", refused.stderr);
    let source = format!("qmp:{}", saved.directory("web").join("qmp.sock").display());
    let image = saved.path("next.img").display().to_string();
    saved.towline(["copy", "--resume", &source, &image].map(str::to_owned)).wait_done(WITHIN).unwrap();
    saved.towline(["inspect", "--verify", &image].map(str::to_owned)).wait_done(WITHIN).unwrap();
    saved.assert_is_saved_guest(&mut saved.agent("web"));
    saved.quit("web");
}

#[test]
fn a_guest_that_sleeps_or_is_migrated_is_not_forked() {
    if !require_lab("a_guest_that_sleeps_or_is_migrated_is_not_forked") {
        return;
    }
    let saved = running("-device virtio-rng-pci");
    let refused = |text: &str| {
        let forked = saved.fork("web", &["--name", "fork", "--detach"]);
        assert_eq!(forked.status.code(), Some(1), "{}", forked.stderr);
        assert!(forked.stderr.contains(text), "{text:?}: {}", forked.stderr);
        assert_eq!(saved.guests(), ["web"]);
    };
    let execute = |command: &str, arguments: Value| saved.monitor("web").execute(command, arguments).unwrap();
    execute("migrate-set-parameters", json!({ "max-bandwidth": 4096 }));
    execute("migrate", json!({ "uri": format!("file:{}", saved.path("slow").display()) }));
    saved.monitor("web").wait_migration("active", WITHIN).unwrap();
    refused("is being migrated (active)");
    execute("migrate_cancel", Value::Null);
    wait_until("the end of the migration", WITHIN, || {
        Ok((execute("query-migrate", Value::Null)["status"] == "cancelled").then_some(()))
    })
    .unwrap();
    saved.assert_is_saved_guest(&mut saved.agent("web"));
    // ACPI's register by which a guest falls asleep.
    execute("human-monitor-command", json!({ "command-line": "o/h 0x604 0x2400" }));
    refused("is `suspended`, expected one that runs or is paused");
    assert_eq!(execute("query-status", Value::Null)["status"], "suspended");
    saved.quit("web");
}
