//! The client against stock QEMU.

#![allow(clippy::unwrap_used, reason = "the exemption for tests does not reach their helpers")]

mod common;

use std::io::{Read, pipe};
use std::os::fd::AsFd;
use std::os::unix::net::UnixListener;
use std::time::Duration;

use common::{TestQemu, WAIT, binaries, until};
use serde::Serialize;
use serde_json::{Map, Value, json};
use towline_qmp::commands::*;
use towline_qmp::{Client, Command, CommandRequest, DisconnectReason, Error, Options};

const SHORT: Duration = Duration::from_millis(300);

/// A command of the caller's own.
#[derive(Serialize)]
struct GetFd {
    fdname: &'static str,
}

impl Command for GetFd {
    const NAME: &'static str = "getfd";
    type Return = Empty;
}

fn short() -> Options {
    Options { greeting_deadline: SHORT, ..Options::default() }
}

#[test]
fn a_client_may_go_to_another_thread() {
    fn is_send<T: Send>() {}
    is_send::<Client>();
    is_send::<Error>();
}

#[test]
fn typed_commands_read_what_qemu_answers() {
    for binary in binaries("typed_commands_read_what_qemu_answers") {
        let disk = tempfile::NamedTempFile::new().unwrap();
        disk.as_file().set_len(1 << 20).unwrap();
        let drive = format!("if=none,id=d0,format=raw,file={}", disk.path().display());
        let qemu =
            TestQemu::q35(&binary, &["-drive", &drive, "-device", "virtio-blk-pci,drive=d0", "-smp", "2"]);
        let mut client = qemu.client();

        let version = client.execute(&QueryVersion).unwrap();
        assert!(binary.expected_major.is_none_or(|major| major == version.qemu.major));
        assert_eq!(client.greeting().version["qemu"]["major"], version.qemu.major);
        let status = client.execute(&QueryStatus).unwrap();
        assert_eq!(status, Status { status: RunState::PRELAUNCH, running: false });
        let cpus = client.execute(&QueryCpusFast).unwrap();
        assert_eq!(cpus.iter().map(|cpu| cpu.cpu_index).collect::<Vec<_>>(), [0, 1]);
        let drives = client.execute(&QueryBlock).unwrap();
        let inserted = drives[0].inserted.as_ref().unwrap();
        assert_eq!((drives[0].device.as_str(), inserted.drv.as_str()), ("d0", "raw"));
        assert_eq!(inserted.image.virtual_size, 1 << 20);
        let text = client.execute(&HumanMonitorCommand { command_line: "info ramblock".into() }).unwrap();
        assert!(text.contains("pc.ram"));
        assert_eq!(client.execute(&QueryMigrate).unwrap(), MigrationInfo::default());

        // Unknown keys are kept: typed and raw are the same.
        let raw = client.execute_raw("query-migrate-parameters", None).unwrap();
        assert_eq!(Value::Object(client.execute(&QueryMigrateParameters).unwrap().to_map()), raw);
        let schema = client.execute_raw("query-qmp-schema", None).unwrap();
        assert!(schema.to_string().len() > 100_000, "QEMU's largest answer");
        assert_eq!(client.peer_credentials().unwrap().pid as u32, qemu.child.id());
    }
}

#[test]
fn memory_backends_are_listed() {
    for binary in binaries("memory_backends_are_listed") {
        let spare = "memory-backend-memfd,id=spare,size=2M,prealloc=on";
        let qemu = TestQemu::q35(&binary, &["-object", spare]);
        let memdevs = qemu.client().execute(&QueryMemdev).unwrap();
        let spare = memdevs.iter().find(|memdev| memdev.id.as_deref() == Some("spare")).unwrap();
        assert_eq!((spare.size, spare.prealloc), (2 << 20, true));
        assert_eq!(spare.other["share"], true);
        assert!(memdevs.iter().any(|memdev| memdev.size == 64 << 20 && !memdev.prealloc), "{memdevs:?}");
    }
}

#[test]
fn refusals_contain_qemus_message() {
    for binary in binaries("refusals_contain_qemus_message") {
        let qemu = TestQemu::start(&binary, &["-machine", "none"]);
        let mut client = qemu.client();
        let error = client.execute_raw("teleport", None).unwrap_err();
        assert!(error.is_command_not_found());
        let expected = format!(
            "QEMU on {} refuses teleport: The command teleport has not been found",
            qemu.path("qmp").display()
        );
        assert_eq!(error.to_string(), expected);
        let error = client.execute(&Migrate::to_uri("gopher:1")).unwrap_err();
        assert!(
            matches!(&error, Error::Refusal { command, class, .. }
            if command == "migrate" && class == "GenericError"),
            "{error}"
        );
    }
}

#[test]
fn several_commands_are_executed_in_order_whatever_one_is_refused() {
    for binary in binaries("several_commands_are_executed_in_order_whatever_one_is_refused") {
        let qemu = TestQemu::q35(&binary, &[]);
        let mut client = qemu.client();
        // The guest runs and stops in turns, so a reply of another command would be found.
        let status = CommandRequest::new(&QueryStatus).unwrap();
        let (cont, stop) = (CommandRequest::new(&Cont).unwrap(), CommandRequest::new(&Stop).unwrap());
        let round = [cont, status.clone(), CommandRequest::raw("teleport", None), stop, status];
        let rounds = 20;
        let requests = vec![round; rounds].concat();
        let replies = client.execute_all(&requests).unwrap();
        assert_eq!(replies.len(), requests.len());
        let mut replies = replies.into_iter();
        let mut next = || replies.next().unwrap();
        for _ in 0..rounds {
            next().value().unwrap();
            assert_eq!(next().of::<QueryStatus>().unwrap().status, RunState::RUNNING);
            assert!(next().value().unwrap_err().is_command_not_found());
            next().value().unwrap();
            assert_eq!(next().of::<QueryStatus>().unwrap().status, RunState::PAUSED);
        }
        let mut events = Vec::new();
        while let Some(event) = client.next_event(Duration::ZERO).unwrap() {
            events.push(event.name);
        }
        assert_eq!(events, ["RESUME", "STOP"].repeat(rounds));
    }
}

#[test]
fn an_awaited_event_is_returned_and_others_are_queued() {
    for binary in binaries("an_awaited_event_is_returned_and_others_are_queued") {
        let qemu = TestQemu::q35(&binary, &[]);
        let mut client = qemu.client();
        client.execute(&Cont).unwrap();
        client.execute(&Stop).unwrap();
        let stop = client.wait_event(|event| event.name == "STOP", WAIT).unwrap();
        assert!(stop.timestamp.seconds > 0);
        assert_eq!(
            client.next_event(WAIT).unwrap().unwrap().name,
            "RESUME",
            "kept, though STOP was waited for"
        );
        assert_eq!(client.next_event(Duration::ZERO).unwrap(), None);

        let error = client.wait_event(|_| true, SHORT).unwrap_err();
        assert!(matches!(&error, Error::NoEvent { waited, .. } if *waited >= SHORT), "{error}");
    }
}

#[test]
fn a_guest_is_sent_into_a_descriptor() {
    for binary in binaries("a_guest_is_sent_into_a_descriptor") {
        let qemu = TestQemu::q35(&binary, &[]);
        let mut client = qemu.client();
        let events = CapabilityState { capability: Capability::EVENTS, state: true };
        client.execute(&MigrateSetCapabilities { capabilities: vec![events] }).unwrap();
        let (mut reader, writer) = pipe().unwrap();
        client.execute_with_fds(&GetFd { fdname: "out" }, &[writer.as_fd()]).unwrap();
        drop(writer);
        client.execute(&Migrate::to_uri("fd:out")).unwrap();
        let mut magic = [0; 4];
        reader.read_exact(&mut magic).unwrap();
        assert_eq!(&magic, b"QEVM");
        drop(reader);

        let failed = |event: &_| MigrationStatus::of_event(event) == Some(MigrationStatus::FAILED);
        client.wait_event(failed, WAIT).unwrap();
        let info = client.execute(&QueryMigrate).unwrap();
        assert_eq!(info.status, Some(MigrationStatus::FAILED));
    }
}

#[test]
fn descriptors_are_added_to_sets() {
    for binary in binaries("descriptors_are_added_to_sets") {
        let qemu = TestQemu::start(&binary, &["-machine", "none"]);
        let mut client = qemu.client();
        let (_reader, writer) = pipe().unwrap();
        let add = AddFd { opaque: Some("a pipe".into()), ..AddFd::default() };
        let added = client.execute_with_fds(&add, &[writer.as_fd()]).unwrap();
        let set = json!({
            "fdset-id": added.fdset_id,
            "fds": [{ "fd": added.fd, "opaque": "a pipe" }]
        });
        assert_eq!(client.execute_raw("query-fdsets", None).unwrap(), json!([set]));
        client.execute(&RemoveFd { fdset_id: added.fdset_id, fd: None }).unwrap();
        assert_eq!(client.execute_raw("query-fdsets", None).unwrap(), json!([]));
        let error = client.execute(&add).unwrap_err();
        assert!(error.to_string().contains("No file descriptor supplied"), "{error}");
    }
}

#[test]
fn a_monitor_in_use_is_named() {
    for binary in binaries("a_monitor_in_use_is_named") {
        let qemu = TestQemu::start(&binary, &["-machine", "none"]);
        let holder = qemu.client();
        let error = Client::connect(qemu.path("qmp"), &short()).unwrap_err();
        assert!(matches!(&error, Error::NoGreeting { .. }), "{error}");
        assert!(error.to_string().contains("another client holds this monitor"), "{error}");

        // QEMU's queue is short; once it is full, connecting itself would block.
        let queued: Vec<_> = (0..8)
            .map(|_| {
                let path = qemu.path("qmp");
                std::thread::spawn(move || Client::connect(path, &short()).unwrap_err())
            })
            .collect();
        let errors: Vec<_> = queued.into_iter().map(|thread| thread.join().unwrap()).collect();
        assert!(
            errors.iter().all(|error| matches!(error, Error::NoGreeting { .. } | Error::Busy { .. })),
            "{errors:?}"
        );
        drop(holder);
        qemu.client().execute(&QueryStatus).unwrap();
    }
}

#[test]
fn a_hanging_qemu_times_out_and_may_recover() {
    for binary in binaries("a_hanging_qemu_times_out_and_may_recover") {
        let qemu = TestQemu::start(&binary, &["-machine", "none"]);
        let mut client = qemu.client();
        qemu.signal("-STOP");
        client.set_deadline(SHORT);
        let error = client.execute(&QueryVersion).unwrap_err();
        assert!(
            matches!(&error, Error::Timeout { command, waited, .. }
            if command == "query-version" && *waited >= SHORT),
            "{error}"
        );
        qemu.signal("-CONT");
        client.set_deadline(WAIT);
        assert!(client.execute(&QueryStatus).unwrap().running, "the late answer was discarded");
    }
}

#[test]
fn a_dead_qemu_is_named() {
    for binary in binaries("a_dead_qemu_is_named") {
        let mut qemu = TestQemu::start(&binary, &["-machine", "none"]);
        let path = qemu.path("qmp");
        let mut client = qemu.client();
        qemu.kill();
        let error = client.execute(&QueryStatus).unwrap_err();
        let expected = format!(
            "the connection to QEMU on {} was lost during query-status: QEMU closed it (ended, crashed, or the \
             monitor was taken away)",
            path.display()
        );
        assert_eq!(error.to_string(), expected);
        assert!(matches!(
            client.next_event(WAIT),
            Err(Error::Disconnected { by: DisconnectReason::PeerClosed, .. })
        ));
        assert!(matches!(Client::connect(&path, &short()), Err(Error::Refused { .. })));
    }
}

#[test]
fn a_human_monitor_is_distinguished_from_qmp() {
    for binary in binaries("a_human_monitor_is_distinguished_from_qmp") {
        let args = ["-machine", "none", "-monitor", "unix:{dir}/hmp,server=on,wait=off"];
        let qemu = TestQemu::start(&binary, &args);
        until("the human monitor", || qemu.path("hmp").exists().then_some(()));
        qemu.client();
        let error = Client::connect(qemu.path("hmp"), &Options::default()).unwrap_err();
        assert!(
            matches!(&error, Error::NotQmp { found, hint, .. }
            if found.starts_with("QEMU ") && hint.contains("human monitor")),
            "{error}"
        );
    }
}

#[test]
fn sockets_that_cannot_be_connected_to() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("qmp");
    let missing = Client::connect(&path, &short()).unwrap_err();
    assert!(
        matches!(&missing, Error::Missing { socket } if *socket == path.display().to_string()),
        "{missing}"
    );
    // Also for a process that another test is starting, which has it until it executes its program.
    rustix::net::shutdown(UnixListener::bind(&path).unwrap(), rustix::net::Shutdown::Both).unwrap();
    let refused = Client::connect(&path, &short()).unwrap_err();
    assert!(matches!(refused, Error::Refused { .. }), "{refused}");
    let long = Client::connect(dir.path().join("x".repeat(200)), &short()).unwrap_err();
    assert!(matches!(long, Error::Connect { .. }), "{long}");
}

#[test]
fn raw_commands_take_arguments() {
    for binary in binaries("raw_commands_take_arguments") {
        let qemu = TestQemu::q35(&binary, &[]);
        let arguments = Map::from_iter([
            ("path".to_owned(), Value::from("/machine")),
            ("property".to_owned(), Value::from("type")),
        ]);
        let answer = qemu.client().execute_raw("qom-get", Some(arguments)).unwrap();
        assert!(answer.as_str().unwrap().starts_with("pc-q35-"));
    }
}
