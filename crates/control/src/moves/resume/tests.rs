use std::fs;
use std::sync::{Mutex, MutexGuard, mpsc};
use std::thread::{self, JoinHandle};

use serde_json::{Map, json};
use tempfile::TempDir;
use towline_qmp::commands::CpuFast;

use super::*;
use crate::journal::UndoRecord;
use crate::moves::{GuestPlan, MoveEnd};
use crate::plan::fake_qemu::FakeQemu;
use crate::process::Process;
use crate::procfs::{VcpuThreads, start_time};

const ID: [u8; 16] = [0xcd; 16];

/// Both ends of these tests are QEMUs of this process, which has one journal.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// A QEMU with one vCPU, which is a thread that sleeps.
struct OneQemu {
    fake: FakeQemu,
    wakes: mpsc::Sender<()>,
    ran: mpsc::Receiver<i32>,
    thread: i32,
    _vcpu: JoinHandle<()>,
    _lock: MutexGuard<'static, ()>,
}

impl OneQemu {
    fn start(status: &'static str, migration: Option<&'static str>) -> Self {
        let lock = ONE_AT_A_TIME.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let fake = FakeQemu::start(status);
        fake.script().migration = migration;
        let (wakes, waits) = mpsc::channel();
        let (tells, ran) = mpsc::channel();
        let vcpu = thread::spawn(move || {
            let own = fs::read_link("/proc/thread-self").unwrap();
            let own: i32 = own.file_name().unwrap().to_str().unwrap().parse().unwrap();
            tells.send(own).unwrap();
            while waits.recv().is_ok() {
                tells.send(own).unwrap();
            }
        });
        let thread = ran.recv().unwrap();
        fake.script().vcpus = vec![thread];
        let started = Self { fake, wakes, ran, thread, _vcpu: vcpu, _lock: lock };
        started.wait_asleep();
        started
    }

    fn wait_asleep(&self) {
        let path = format!("/proc/self/task/{}/status", self.thread);
        while !fs::read_to_string(&path).unwrap().contains("State:\tS") {
            thread::yield_now();
        }
    }

    /// Its guest runs for a moment.
    fn run(&self) {
        self.wakes.send(()).unwrap();
        self.ran.recv().unwrap();
        self.wait_asleep();
    }

    fn end(&self) -> MoveEnd {
        let pid = std::process::id().cast_signed();
        MoveEnd::Qemu { socket: self.fake.path(), pid: Some(pid), start_time: start_time(pid).ok() }
    }

    fn switches(&self) -> Option<u64> {
        let pid = std::process::id().cast_signed();
        let own = rustix::process::Pid::from_raw(pid).unwrap();
        let pidfd = rustix::process::pidfd_open(own, rustix::process::PidfdFlags::empty()).unwrap();
        let process = Process::Known { pid, start_time: start_time(pid).unwrap(), pidfd };
        let cpu: CpuFast = serde_json::from_value(
            json!({ "cpu-index": 0, "thread-id": self.thread, "qom-path": "/c", "target": "x86_64" }),
        )
        .unwrap();
        VcpuThreads::of(process.pid(), &[cpu]).switches()
    }
}

fn peer() -> MoveEnd {
    MoveEnd::Peer { address: "tcp:10.0.0.1:4444".into() }
}

/// The record of a towline that was killed, and the result of resuming it.
fn resumed(record: &MoveRecord, choice: Option<ResumeChoice>) -> Result<Resumed, Error> {
    let place = TempDir::new().unwrap();
    resumed_in(&RuntimeDirectory::below(place.path()).unwrap(), record, choice)
}

fn resumed_in(
    directory: &RuntimeDirectory,
    record: &MoveRecord,
    choice: Option<ResumeChoice>,
) -> Result<Resumed, Error> {
    let mut file = RecordFile::new(directory.clone(), record.clone());
    file.write(record.clone()).unwrap();
    drop(file);
    resume_in(directory, "cdcd", choice)
}

fn record(source: MoveEnd, destination: MoveEnd, stage: Decision) -> MoveRecord {
    let plan = GuestPlan { live: true, run: true, quit: false, shared_memory: false };
    MoveRecord::new(Id::of(ID), source, destination, stage, plan)
}

fn undecided(record: &MoveRecord) -> String {
    match resumed(record, None).unwrap().finding {
        Finding::Undecided { text, .. } => text,
        finding => panic!("{finding:?}"),
    }
}

/// QEMU reports the same for any of its migrations.
#[test]
fn a_completed_migration_is_that_of_the_move_if_the_guest_has_not_run_since() {
    let qemu = OneQemu::start("postmigrate", Some("completed"));
    let mut record = record(qemu.end(), peer(), Decision::Acknowledge);
    let unproven = "is postmigrate, but not provably by this move";
    assert!(undecided(&record).contains(unproven), "of an earlier version, or of a guest that slept");
    record.source_vcpu_switches = qemu.switches();
    let text = undecided(&record);
    assert!(text.contains("(postmigrate); whole at") && !text.contains(unproven), "{text}");
    let mut unlike = record.clone();
    unlike.guest_plan.live = false;
    assert!(undecided(&unlike).contains(unproven), "it was paused, and is to run");
    qemu.run();
    let text = undecided(&record);
    assert!(text.contains(unproven) && text.contains("TWO GUESTS"), "{text}");
    // What it holds may be the newest.
    let refused = resumed(&record, Some(ResumeChoice::Discard(None))).unwrap_err();
    assert!(refused.to_string().contains(unproven), "{refused}");
    assert_eq!(qemu.fake.commands(), [""; 0]);
}

#[test]
fn a_guest_gets_its_detached_devices_where_it_is_run() {
    let add = Map::from_iter([
        ("driver".to_owned(), json!("vhost-user-vsock-pci")),
        ("id".to_owned(), json!("v0")),
    ]);
    let device = UndoRecord::Device { path: "/machine/peripheral/v0".into(), add };
    for is_there in [false, true] {
        let qemu = OneQemu::start("paused", Some("completed"));
        if is_there {
            qemu.fake.script().devices.push("v0");
        }
        // Its chardev is in use until the one that was unplugged is freed.
        qemu.fake.script().refused_devices = 3;
        let mut record = record(peer(), qemu.end(), Decision::Run);
        record.devices.push(device.clone());
        let resumed = resumed(&record, None).unwrap();
        assert_eq!(resumed.finding, Finding::AtDestination);
        let expected = if is_there { "device v0 is plugged in" } else { "device v0 plugged again" };
        assert!(resumed.done.iter().any(|done| done == expected), "{resumed:?}");
        let commands = qemu.fake.commands();
        assert_eq!(commands.iter().any(|command| command == "device_add"), !is_there, "{commands:?}");
        assert_eq!(commands[0], "cont");
    }
}

/// A guest that ran has run, whether its operator pauses it or not.
#[test]
fn a_guest_that_was_left_at_its_destination_is_not_taken_from_there() {
    let qemu = OneQemu::start("paused", Some("completed"));
    let record = record(peer(), qemu.end(), Decision::Run);
    let refused = resumed(&record, Some(ResumeChoice::Discard(None))).unwrap_err();
    assert!(refused.to_string().contains("may have run there, because"), "{refused}");
    assert_eq!(qemu.fake.commands(), [""; 0]);
}

/// The word of the other host decides, and is not asked for where both ends are seen.
#[test]
fn the_state_of_the_other_end_finishes_a_move_where_it_leaves_no_doubt() {
    use OtherEnd::{Done, Fenced, HasIt};

    let finished =
        |record: &MoveRecord, other| resumed(record, Some(ResumeChoice::OtherEnd(other))).unwrap().finding;
    for (other, commands, expected) in [
        (Done, &["cont"][..], Some(Finding::AtDestination)),
        (HasIt, &[], Some(Finding::AtSource)),
        (Fenced, &[], None),
    ] {
        let qemu = OneQemu::start("paused", Some("completed"));
        let found = finished(&record(peer(), qemu.end(), Decision::Acknowledge), other);
        assert_eq!(expected.is_none(), matches!(found, Finding::Undecided { .. }), "{found:?}");
        assert!(expected.is_none_or(|expected| expected == found));
        assert_eq!(qemu.fake.commands(), commands, "destination, {other:?}");
    }
    for (other, commands, expected) in [
        (Done, &["cont"][..], Some(Finding::AtSource)),
        (HasIt, &[], Some(Finding::AtDestination)),
        (Fenced, &[], None),
    ] {
        let qemu = OneQemu::start("postmigrate", Some("completed"));
        let mut record = record(qemu.end(), peer(), Decision::Complete);
        record.source_vcpu_switches = qemu.switches();
        let found = finished(&record, other);
        assert_eq!(expected.is_none(), matches!(found, Finding::Undecided { .. }), "{found:?}");
        assert!(expected.is_none_or(|expected| expected == found));
        assert_eq!(qemu.fake.commands(), commands, "source, {other:?}");
    }
    let qemu = OneQemu::start("paused", Some("completed"));
    let both = record(qemu.end(), qemu.end(), Decision::Acknowledge);
    let refused = resumed(&both, Some(ResumeChoice::OtherEnd(Done))).unwrap_err();
    assert!(refused.to_string().contains("both ends are on this host"), "{refused}");
}

/// Its monitor is gone, and it still frees its memory.
#[test]
fn a_qemu_that_is_ending_is_awaited() {
    let mut child = std::process::Command::new("sleep").arg("0.3").spawn().unwrap();
    let pid = i32::try_from(child.id()).unwrap();
    let socket = "/nonexistent/qmp".into();
    let end = MoveEnd::Qemu { socket, pid: Some(pid), start_time: start_time(pid).ok() };
    let found = resumed(&record(peer(), end, Decision::Acknowledge), None).unwrap();
    assert_eq!(found.finding, Finding::Ended, "{found:?}");
    child.wait().unwrap();
}

/// The former towline may have done its last action.
#[test]
fn a_start_that_is_refused_leaves_the_former_decision() {
    for stage in [Decision::Acknowledge, Decision::Run] {
        let place = TempDir::new().unwrap();
        let directory = RuntimeDirectory::below(place.path()).unwrap();
        let qemu = OneQemu::start("paused", Some("completed"));
        qemu.fake.script().cont = None;
        let record = record(peer(), qemu.end(), stage);
        let error = resumed_in(&directory, &record, Some(ResumeChoice::RunHere(None))).unwrap_err();
        assert!(error.to_string().contains("lock"), "{error}");
        let (records, _) = record_file::list(&directory);
        assert_eq!(records[0].stage, stage);
    }
}

#[test]
fn of_several_at_once_one_finishes_the_move_and_the_others_find_it_in_use_or_finished() {
    let place = TempDir::new().unwrap();
    let directory = RuntimeDirectory::below(place.path()).unwrap();
    let record = record(peer(), peer(), Decision::Acknowledge);
    for _ in 0..50 {
        let mut file = RecordFile::new(directory.clone(), record.clone());
        file.write(record.clone()).unwrap();
        drop(file);
        let results: Vec<_> = thread::scope(|scope| {
            let resume = || resume_in(&directory, "cdcd", Some(ResumeChoice::Forget));
            let threads: Vec<_> = (0..5).map(|_| scope.spawn(resume)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        for result in &results {
            let named = matches!(result, Ok(_) | Err(Error::InUse { .. } | Error::Unknown { .. }));
            assert!(named, "{result:?}");
        }
        assert!(super::super::names_of(&directory, &record.id).is_empty());
    }
}
