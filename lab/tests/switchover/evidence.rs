//! Evidence that a later towline accepts: of this move, and not of what became of the guest since.

use std::cell::RefCell;

use rustix::process::Signal;
use serde_json::{Value, json};
use towline_lab::{Qemu, Towline, Version, wait_until};

use crate::monitors::{Socat, has_socat};
use crate::records::{Host, has_hosts, id};
use crate::support::{
    Scratch, SentCopy, WITHIN, assert_ended, assert_runs_only_in, counting, is_live, qmp,
    sent_to_a_suspended_destination, signal, small, waiting,
};

/// A move on one host that has been decided: the source has completed, and its monitor does not reply.
pub(crate) struct Held {
    pub(crate) towline: Towline,
    pub(crate) source: Qemu,
    pub(crate) destination: Qemu,
    proxy: Socat,
    place: Scratch,
}

impl Held {
    pub(crate) fn start(host: &Host) -> Self {
        let (place, proxy) = (Scratch::new(), RefCell::new(None));
        let socket = place.text("a.qmp");
        let SentCopy { suspended, towline, source, destination } =
            sent_to_a_suspended_destination(&|source, destination| {
                drop(proxy.borrow_mut().take());
                std::fs::remove_file(&socket).ok();
                *proxy.borrow_mut() = Some(Socat::start(&socket, source));
                host.start(&format!("move --json --multifd-channels 0 qmp:{socket} {}", qmp(destination)))
            });
        let proxy = proxy.into_inner().unwrap();
        // The process of QEMU is not stopped: that would schedule its vCPUs.
        signal(proxy.pid(), Signal::STOP);
        drop(suspended);
        wait_until("a record", WITHIN, || Ok((!host.moves().is_empty()).then_some(()))).unwrap();
        source.qmp().wait_status("postmigrate", WITHIN).unwrap();
        Self { towline, source, destination, proxy, place }
    }

    /// Kills the towline. The monitor replies again, by the same name as long as the directory exists.
    pub(crate) fn kill(self) -> (Qemu, Qemu, Scratch) {
        let Self { mut towline, source, destination, proxy, place } = self;
        towline.kill().unwrap();
        drop(proxy);
        let socket = place.path("a.qmp");
        std::fs::remove_file(&socket).unwrap();
        std::os::unix::fs::symlink(source.qmp_path(), &socket).unwrap();
        (source, destination, place)
    }
}

/// The source's state is that of a completed migration again, which is not the one of the move.
#[test]
fn a_source_that_was_resumed_and_sent_elsewhere_is_no_evidence() {
    if !has_socat("a_source_that_was_resumed_and_sent_elsewhere_is_no_evidence")
        || !has_hosts("a_source_that_was_resumed_and_sent_elsewhere_is_no_evidence")
    {
        return;
    }
    let host = Host::new();
    let (source, destination, _place) = Held::start(&host).kill();
    source.qmp().execute("cont", Value::Null).unwrap();
    source.wait_counting(WITHIN).unwrap();
    // As the killed towline left it: `exec:` has no way back.
    let off = json!({ "capabilities": [{ "capability": "return-path", "state": false }] });
    source.qmp().execute("migrate-set-capabilities", off).unwrap();
    source.qmp().execute("migrate", json!({ "uri": "exec:cat >/dev/null" })).unwrap();
    source.qmp().wait_status("postmigrate", WITHIN).unwrap();
    let id = id(&host.only());
    assert_ended(&host.run(&format!("resume {id}")), 3, &["not provably by this move", "TWO GUESTS"]);
    assert!(!is_live(&destination));
    let refused = host.run(&format!("resume {id} --discard=source"));
    assert_ended(&refused, 1, &["refused", "not provably by this move"]);
    // Where it was sent is not known here, so the record stays until it is forgotten.
    assert_ended(
        &host.run(&format!("resume {id} --discard=destination")),
        3,
        &["is undecided", "Look where it went"],
    );
    assert!(destination.wait_exit(WITHIN).unwrap().success());
    assert_ended(&host.run(&format!("resume {id} --forget")), 0, &[]);
    assert!(host.moves().is_empty());
}

/// The guest ran there: the source's state is older, no matter what its operator does.
#[test]
fn a_guest_that_ran_at_its_destination_is_not_thrown_away_when_it_is_paused() {
    if !has_hosts("a_guest_that_ran_at_its_destination_is_not_thrown_away_when_it_is_paused") {
        return;
    }
    let (host, builder) = (Host::new(), small(Version::V10_0));
    let (source, destination) = (counting(&builder), waiting(&builder));
    assert_ended(&host.run(&format!("copy {} {}", qmp(&source), qmp(&destination))), 0, &[]);
    let recorded = host.only();
    let id = id(&recorded);
    assert_eq!(recorded["stage"], "left");
    destination.wait_counting(WITHIN).unwrap();
    destination.qmp().execute("stop", Value::Null).unwrap();
    for choice in ["--run-here=source", "--discard=destination"] {
        let refused = host.run(&format!("resume {id} {choice}"));
        assert_ended(&refused, 1, &["refused", "may have run there"]);
        assert_eq!(source.qmp().status().unwrap(), "postmigrate");
        assert_eq!(destination.qmp().status().unwrap(), "paused");
    }
    assert_ended(&host.run(&format!("resume {id} --run-here=destination")), 0, &[]);
    assert_runs_only_in(&destination, &source);
}

/// The record is removed by one of them; for the others it is not there, or in use.
#[test]
fn a_move_that_several_towlines_resume_is_finished_once() {
    if !has_socat("a_move_that_several_towlines_resume_is_finished_once")
        || !has_hosts("a_move_that_several_towlines_resume_is_finished_once")
    {
        return;
    }
    let host = Host::new();
    let (source, destination, _place) = Held::start(&host).kill();
    let id = id(&host.only());
    let resumed: Vec<_> = (0..5).map(|_| host.start(&format!("resume {id}"))).collect();
    let resumed: Vec<_> = resumed.into_iter().map(crate::support::end).collect();
    let done = resumed.iter().filter(|one| one.status.success()).count();
    assert_eq!(done, 1, "{resumed:?}");
    for one in resumed.iter().filter(|one| !one.status.success()) {
        let is_known = one.stderr.contains("another towline") || one.stderr.contains("no move");
        assert!(is_known && !one.stderr.contains("No such file"), "{}", one.stderr);
    }
    destination.qmp().wait_status("running", WITHIN).unwrap();
    assert!(source.wait_exit(WITHIN).unwrap().success(), "it was a move");
    assert!(host.moves().is_empty());
}
