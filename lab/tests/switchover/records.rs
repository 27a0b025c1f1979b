//! A move that is interrupted or killed at the point of no return is recorded at both ends, and `towline
//! moves` and `towline resume` finish it.

use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::process::Command;

use rustix::process::Signal;
use serde_json::{Value, json};
use towline_lab::expect::events;
use towline_lab::{
    Action, Builder, Finished, Flow, Proxy, Qemu, Towline, Trigger, Version, require_lab, skip,
    towline_binary,
};

use crate::evidence::Held;
use crate::monitors::has_socat;
use crate::support::{
    OUTCOME, PLACED, SHUT, Scratch, SentCopy, Suspended, WITHIN, assert_ended, assert_runs_nowhere,
    assert_runs_only_in, counting, end, is_live, listens_at, qmp, sent_to_a_suspended_destination, signal,
    small, wait_fired, waiting,
};

/// A host as records see it: it has its own runtime directory.
pub(crate) struct Host(Scratch);

impl Host {
    pub(crate) fn new() -> Self {
        let scratch = Scratch::new();
        std::fs::create_dir(scratch.path("run")).unwrap();
        Self(scratch)
    }

    pub(crate) fn start(&self, arguments: &str) -> Towline {
        // Root's records are in /run, those of other users in XDG_RUNTIME_DIR.
        let script =
            "if [ $(id -u) = 0 ]; then mount --bind \"$0\" /run; fi; XDG_RUNTIME_DIR=\"$0\" exec \"$@\"";
        let run = self.0.text("run");
        let binary = towline_binary().unwrap().display().to_string();
        let by = ["--mount", "sh", "-c", script, &run, &binary];
        Towline::start(Path::new("/usr/bin/unshare"), by.into_iter().chain(arguments.split_whitespace()))
            .unwrap()
    }

    pub(crate) fn run(&self, arguments: &str) -> Finished {
        end(self.start(arguments))
    }

    /// Moves that are listed on this host.
    pub(crate) fn moves(&self) -> Vec<Value> {
        let finished = self.run("moves --json");
        assert_ended(&finished, 0, &[]);
        let mut listed = events(&finished.stdout);
        assert_eq!(listed.pop().unwrap()["event"], "moves");
        listed
    }

    /// The only recorded move.
    pub(crate) fn only(&self) -> Value {
        let mut moves = self.moves();
        assert_eq!(moves.len(), 1, "{moves:?}");
        moves.remove(0)
    }
}

pub(crate) fn id(recorded: &Value) -> String {
    recorded["id"].as_str().unwrap().to_owned()
}

/// Returns true if this user may have a separate /run; if not, prints the skip of `name`.
pub(crate) fn has_hosts(name: &str) -> bool {
    let can = Command::new("unshare").args(["--mount", "true"]).status();
    let can = can.is_ok_and(|status| status.success());
    if !can {
        skip(name, "this user may not have a mount namespace");
    }
    can && require_lab(name)
}

/// Two hosts that moved a guest over a link, which was cut or held at a given moment.
pub(crate) struct Cut {
    hosts: (Host, Host),
    pub(crate) source: Qemu,
    pub(crate) destination: Qemu,
}

/// Towline that is killed when the link is held; `None`: the link is cut.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Killed {
    Nobody,
    Here,
    There,
    /// The towline of the source gets a SIGINT.
    Interrupted,
}

fn cut(command: &str, flow: Flow, bytes: &[u8], forwards: bool, dies: Killed) -> Cut {
    let builder = small(Version::V10_0);
    cut_at(
        command,
        &[builder.clone(), builder],
        Trigger { flow, bytes: bytes.to_vec(), forwards, action: Action::Cut },
        dies,
    )
}

/// As [`cut`], between these QEMUs, at bytes that are not forwarded.
pub(crate) fn cut_between(
    command: &str,
    builders: &[Builder; 2],
    flow: Flow,
    bytes: &[u8],
    dies: Killed,
) -> Cut {
    let trigger = Trigger { flow, bytes: bytes.to_vec(), forwards: false, action: Action::Cut };
    cut_at(command, builders, trigger, dies)
}

fn cut_at(command: &str, builders: &[Builder; 2], trigger: Trigger, dies: Killed) -> Cut {
    let hosts = (Host::new(), Host::new());
    let (source, destination) = (counting(&builders[0]), waiting(&builders[1]));
    let options = "--json --multifd-channels 0";
    let mut there = hosts.1.start(&format!("copy {options} tcp:127.0.0.1:0 {}", qmp(&destination)));
    let proxy = Proxy::start(listens_at(&mut there)).unwrap();
    let action = if dies == Killed::Nobody { Action::Cut } else { Action::Hold(trigger.flow) };
    proxy.set_trigger(Trigger { action, ..trigger });
    let mut here = hosts.0.start(&format!("{command} {options} {} tcp:{}", qmp(&source), proxy.address()));
    wait_fired(&proxy);
    match dies {
        Killed::Nobody => {}
        Killed::Here => here.kill().unwrap(),
        Killed::There => there.kill().unwrap(),
        Killed::Interrupted => signal(here.pid(), Signal::INT),
    }
    if dies != Killed::Nobody {
        proxy.cut();
    }
    for (towline, is_dead) in [(here, dies == Killed::Here), (there, dies == Killed::There)] {
        if !is_dead {
            let finished = end(towline);
            assert_ne!(finished.status.code(), Some(2), "{}", finished.stderr);
        }
    }
    Cut { hosts, source, destination }
}

#[test]
fn an_undecided_move_is_finished_at_its_destination() {
    if !has_hosts("an_undecided_move_is_finished_at_its_destination") {
        return;
    }
    for dies in [Killed::Nobody, Killed::Here, Killed::There] {
        let Cut { hosts: (here, there), source, destination } =
            cut("move", Flow::ToDestination, OUTCOME, false, dies);
        source.qmp().wait_status("postmigrate", WITHIN).unwrap();
        let (at_source, at_destination) = (here.only(), there.only());
        let id = id(&at_source);
        assert_eq!(at_destination["id"], json!(id));
        assert_eq!((&at_source["role"], &at_source["stage"]), (&json!("source"), &json!("complete")));
        assert_eq!(
            (&at_destination["role"], &at_destination["stage"]),
            (&json!("destination"), &json!("acknowledge"))
        );
        // Neither end can decide alone.
        for (host, text) in [(&here, "may run it"), (&there, "Look at its source")] {
            assert_ended(&host.run(&format!("resume {id}")), 3, &["is undecided", text, "TWO GUESTS"]);
        }
        assert_runs_nowhere(&source, &destination);
        let finished = there.run(&format!("resume {} --run-here", &id[..6]));
        assert_ended(&finished, 0, &[]);
        assert!(finished.stdout.contains("runs the guest"), "{}", finished.stdout);
        assert_runs_only_in(&destination, &source);
        assert_ended(&here.run(&format!("resume {id} --discard")), 0, &[]);
        assert!(source.wait_exit(WITHIN).unwrap().success());
        assert!(here.moves().is_empty() && there.moves().is_empty());
        assert_ended(&here.run(&format!("resume {id}")), 2, &["no move", "is recorded"]);
    }
}

#[test]
fn an_undecided_move_is_reverted_to_its_source() {
    if !has_hosts("an_undecided_move_is_reverted_to_its_source") {
        return;
    }
    let Cut { hosts: (here, there), source, destination } =
        cut("move", Flow::ToSource, SHUT, true, Killed::Nobody);
    let id = id(&here.only());
    assert_ended(&there.run(&format!("resume {id} --discard")), 0, &[]);
    assert!(destination.wait_exit(WITHIN).unwrap().success());
    assert_ended(&here.run(&format!("resume {id} --run-here")), 0, &[]);
    source.qmp().wait_status("running", WITHIN).unwrap();
    source.wait_counting(WITHIN).unwrap();
    assert!(here.moves().is_empty() && there.moves().is_empty());
}

/// The source runs on: the guest must not run at the destination too, which the other host refuses.
#[test]
fn a_destination_whose_source_runs_on_is_discarded() {
    if !has_hosts("a_destination_whose_source_runs_on_is_discarded") {
        return;
    }
    let Cut { hosts: (here, there), source, destination } =
        cut("move", Flow::ToSource, SHUT, false, Killed::Nobody);
    assert!(here.moves().is_empty(), "it ended with the guest safe at its source");
    let id = id(&there.only());
    assert_ended(&there.run(&format!("resume {id}")), 3, &["Look at its source"]);
    assert_runs_only_in(&source, &destination);
    assert_ended(&there.run(&format!("resume {id} --discard")), 0, &[]);
    assert!(destination.wait_exit(WITHIN).unwrap().success());
    source.wait_counting(WITHIN).unwrap();
    assert!(there.moves().is_empty());
}

/// The destination ran it without the source's knowledge: the source's towline is undecided, and the guest is
/// not run there.
#[test]
fn a_source_whose_destination_runs_is_discarded_and_kept_from_a_later_copy() {
    if !has_hosts("a_source_whose_destination_runs_is_discarded_and_kept_from_a_later_copy") {
        return;
    }
    let Cut { hosts: (here, there), source, destination } =
        cut("copy", Flow::ToSource, PLACED, false, Killed::Nobody);
    assert!(there.moves().is_empty(), "it ended well");
    let id = id(&here.only());
    let image = here.0.text("guest.img");
    let finished = here.run(&format!("copy --resume {} {image}", qmp(&source)));
    assert_ended(&finished, 1, &["is undecided", &format!("towline resume {id}")]);
    assert_ended(&here.run(&format!("resume {id}")), 3, &["may run it"]);
    assert_runs_only_in(&destination, &source);
    assert_ended(&here.run(&format!("resume {id} --discard")), 0, &[]);
    assert!(source.wait_exit(WITHIN).unwrap().success());
}

/// Both ends on one host, and towline killed when the destination has everything: the QEMUs' states suffice
/// to decide.
#[test]
fn a_move_killed_at_the_decision_on_one_host_is_finished_from_the_run_states() {
    let name = "a_move_killed_at_the_decision_on_one_host_is_finished_from_the_run_states";
    if !has_socat(name) || !has_hosts(name) {
        return;
    }
    let host = Host::new();
    let held = Held::start(&host);
    let recorded = host.only();
    let id = id(&recorded);
    assert_eq!((&recorded["role"], &recorded["stage"]), (&json!("both"), &json!("acknowledge")));
    // While it lives, it owns the move.
    let owner = format!("another towline (process {})", recorded["owner-pid"]);
    assert_ended(&host.run(&format!("resume {id}")), 1, &[&owner, "works on move"]);
    let (source, destination, _place) = held.kill();
    // Choices that would run two guests, or lose it, are refused.
    assert_ended(&host.run(&format!("resume {id} --run-here")), 1, &["both ends are on this host: name one"]);
    let repaired = host.run(&format!("repair {}", qmp(&destination)));
    assert!(repaired.stderr.contains(&format!("towline resume {id}")), "{}", repaired.stderr);
    assert_ended(&host.run(&format!("resume {id}")), 0, &[]);
    destination.qmp().wait_status("running", WITHIN).unwrap();
    destination.wait_counting(WITHIN).unwrap();
    assert!(source.wait_exit(WITHIN).unwrap().success(), "it was a move");
    assert!(host.moves().is_empty());
}

#[test]
fn the_wrong_choice_is_refused() {
    if !has_hosts("the_wrong_choice_is_refused") {
        return;
    }
    let host = Host::new();
    let SentCopy { suspended, mut towline, source, destination } =
        sent_to_a_suspended_destination(&|source, destination| {
            host.start(&format!("copy --json --multifd-channels 0 {} {}", qmp(source), qmp(destination)))
        });
    let silent = Suspended::new(&source);
    drop(suspended);
    towline_lab::wait_until("a record", WITHIN, || Ok((!host.moves().is_empty()).then_some(()))).unwrap();
    towline.kill().unwrap();
    drop(silent);
    source.qmp().wait_status("postmigrate", WITHIN).unwrap();
    let id = id(&host.only());
    // An operator has resumed it at its source.
    source.qmp().execute("cont", Value::Null).unwrap();
    for (choice, text) in [("--run-here=destination", "running at"), ("--discard=source", "running at")] {
        assert_ended(&host.run(&format!("resume {id} {choice}")), 1, &["refused", text]);
    }
    assert_runs_only_in(&source, &destination);
    source.qmp().execute("stop", Value::Null).unwrap();
    assert!(!is_live(&destination));
    assert_ended(&host.run(&format!("resume {id}")), 0, &[]);
    assert!(!is_live(&destination), "the source has it, paused");
    assert!(host.moves().is_empty());
}

/// A QEMU that has exited is shown as such, and its record is removed.
#[test]
fn a_record_of_a_qemu_that_exited_is_shown_and_removed() {
    if !has_hosts("a_record_of_a_qemu_that_exited_is_shown_and_removed") {
        return;
    }
    let Cut { hosts: (here, there), source, destination } =
        cut("move", Flow::ToDestination, OUTCOME, false, Killed::Nobody);
    signal(destination.pid(), Signal::KILL);
    destination.wait_exit(WITHIN).unwrap();
    let recorded = there.only();
    assert_eq!(recorded["exited"], json!([qmp(&destination)]));
    assert_ended(&there.run(&format!("resume {}", id(&recorded))), 0, &[]);
    assert!(there.moves().is_empty());
    let recorded = here.only();
    assert_ended(&here.run(&format!("resume {} --forget", id(&recorded))), 0, &[]);
    assert!(here.moves().is_empty());
    assert_eq!(source.qmp().status().unwrap(), "postmigrate");
}

/// An operator's paused guest, copied every night: the second copy must not run it.
#[test]
fn a_paused_guest_that_is_copied_twice_is_not_run() {
    if !has_hosts("a_paused_guest_that_is_copied_twice_is_not_run") {
        return;
    }
    let (host, source) = (Host::new(), counting(&small(Version::V10_0)));
    source.qmp().execute("stop", Value::Null).unwrap();
    let image = |name: &str| host.0.text(name);
    assert_ended(&host.run(&format!("copy --resume {} {}", qmp(&source), image("1.img"))), 0, &[]);
    source.qmp().wait_status("postmigrate", WITHIN).unwrap();
    let finished = host.run(&format!("copy --resume {} {}", qmp(&source), image("2.img")));
    assert_ended(&finished, 1, &["was paused when it was copied"]);
    assert_eq!(source.qmp().status().unwrap(), "postmigrate");
    // After an operator has resumed it, it can be copied again.
    source.qmp().execute("cont", Value::Null).unwrap();
    assert_ended(&host.run(&format!("copy {} {}", qmp(&source), image("2.img"))), 0, &[]);
    assert_ended(&host.run(&format!("copy --resume {} {}", qmp(&source), image("3.img"))), 0, &[]);
    source.qmp().wait_status("running", WITHIN).unwrap();
}

/// It may be of the guest that it names, and is of no other one.
#[test]
fn a_record_of_another_version_keeps_only_its_own_guest_from_being_sent() {
    if !has_hosts("a_record_of_another_version_keeps_only_its_own_guest_from_being_sent") {
        return;
    }
    let (host, builder) = (Host::new(), small(Version::V10_0));
    let sources = [counting(&builder), counting(&builder)];
    let image = |name: &str| host.0.text(name);
    sources[0].qmp().execute("stop", Value::Null).unwrap();
    for (source, name) in sources.iter().zip(["1.img", "2.img"]) {
        assert_ended(&host.run(&format!("copy {} {}", qmp(source), image(name))), 0, &[]);
        source.qmp().wait_status("postmigrate", WITHIN).unwrap();
    }
    // Of the second there is none: it ran until it was copied.
    let path = host.0.path(&format!("run/towline/journal/move-{}-source.json", id(&host.only())));
    let record = std::fs::read_to_string(&path).unwrap();
    std::fs::write(&path, record.replacen("\"version\":1", "\"version\":2,\"added\":true", 1)).unwrap();
    let again = |source: &Qemu| host.run(&format!("copy --resume {} {}", qmp(source), image("3.img")));
    assert_ended(&again(&sources[0]), 1, &["expected a record of version 1", "version 2"]);
    assert_ended(&again(&sources[1]), 0, &[]);
    sources[1].qmp().wait_status("running", WITHIN).unwrap();
    assert_ended(&host.run("moves"), 1, &["version 2", "run the guest at one of them only"]);
}

/// The destination runs: a later copy must not run the source too.
#[test]
fn a_source_whose_guest_runs_elsewhere_is_not_run_by_a_later_copy() {
    if !has_hosts("a_source_whose_guest_runs_elsewhere_is_not_run_by_a_later_copy") {
        return;
    }
    let (host, builder) = (Host::new(), small(Version::V10_0));
    for paused in [false, true] {
        let (source, destination) = (counting(&builder), waiting(&builder));
        if paused {
            source.qmp().execute("stop", Value::Null).unwrap();
        }
        assert_ended(&host.run(&format!("copy --run {} {}", qmp(&source), qmp(&destination))), 0, &[]);
        let id = id(&host.only());
        let again = format!("copy --resume {} {}", qmp(&source), host.0.text("guest.img"));
        assert_ended(&host.run(&again), 1, &["made to run there", "to run it here too would run it twice"]);
        assert_ended(&host.run(&format!("resume {id} --run-here=source")), 1, &["refused", "running at"]);
        assert_runs_only_in(&destination, &source);
        // Only one choice is left when the other QEMU has exited.
        signal(destination.pid(), Signal::KILL);
        destination.wait_exit(WITHIN).unwrap();
        assert_ended(&host.run(&format!("resume {id}")), 3, &["is undecided"]);
        assert_ended(&host.run(&format!("resume {id} --run-here=source")), 0, &[]);
        source.qmp().wait_status("running", WITHIN).unwrap();
        assert!(host.moves().is_empty());
    }
}

/// A move without a record is not completed: the guest stays at its source.
#[test]
fn a_move_that_cannot_be_recorded_leaves_the_guest_at_its_source() {
    if !has_hosts("a_move_that_cannot_be_recorded_leaves_the_guest_at_its_source") {
        return;
    }
    if std::fs::metadata("/proc/self").unwrap().uid() != 0 {
        skip(
            "a_move_that_cannot_be_recorded_leaves_the_guest_at_its_source",
            "only root may mount a file system that is full",
        );
        return;
    }
    let builder = small(Version::V10_0);
    let (source, destination) = (counting(&builder), waiting(&builder));
    // Journals that cannot be written are disabled.
    let script = "mount -t tmpfs -o size=64k,mode=755 tmpfs /run && mkdir -p /run/towline && mkdir -m 700 /run/towline/journal \
        && ! dd if=/dev/zero of=/run/filler bs=4k 2>/dev/null; exec \"$@\"";
    let binary = towline_binary().unwrap().display().to_string();
    let (from, to) = (qmp(&source), qmp(&destination));
    let by = ["--mount", "sh", "-c", script, "sh", &binary, "move", &from, &to];
    let finished = end(Towline::start(Path::new("/usr/bin/unshare"), by).unwrap());
    assert_ended(&finished, 1, &["record /run/towline/journal/move-", "No space left", "safe at its source"]);
    assert_runs_only_in(&source, &destination);
}

/// A successful move leaves no record.
#[test]
fn a_move_that_goes_well_leaves_no_record() {
    if !has_hosts("a_move_that_goes_well_leaves_no_record") {
        return;
    }
    let (host, builder) = (Host::new(), small(Version::V10_0));
    let (source, destination) = (counting(&builder), waiting(&builder));
    assert_ended(&host.run(&format!("move {} {}", qmp(&source), qmp(&destination))), 0, &[]);
    assert!(host.moves().is_empty());
    let journal = host.0.path("run/towline/journal");
    let names: Vec<_> = std::fs::read_dir(journal).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert!(names.iter().all(|name| !name.to_string_lossy().contains("move-")), "{names:?}");
}
