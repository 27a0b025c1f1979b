//! Commands: how they end, and that they do.
#![allow(clippy::unwrap_used)] // Helpers of tests are tests.

mod common;

use common::{cancel, open, pattern, recv_exact, recv_to_end, send_all, soon, spawn_asleep};
use rustix::io::Errno;
use rustix::process::{Pid, test_kill_process_group};
use std::net::Shutdown;
use std::os::unix::process::ExitStatusExt;
use std::time::Instant;
use towline_channel::{Address, Channel, Error, ExecChannel, Listener, Result};

#[track_caller]
fn assert_failed<T: std::fmt::Debug>(result: Result<T>, command: &str, code: i32) {
    match result {
        Err(Error::Command { command: found, status }) => {
            assert_eq!((found.as_str(), status.code()), (command, Some(code)));
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_failing_command_is_no_short_stream() {
    let command = "printf abc; exit 3";
    let channel = open(&format!("exec:{command}"));
    assert_eq!(recv_exact(&*channel, 3).unwrap(), b"abc");
    assert_failed(recv_to_end(&*channel), command, 3);
    assert_failed(channel.finish(soon()), command, 3);
}

#[test]
fn a_command_that_stops_reading_reports_the_reason() {
    let command = "head -c 10 > /dev/null; exit 4";
    let channel = open(&format!("exec:{command}"));
    let data = pattern(1 << 20);
    assert_failed(send_all(&*channel, &data), command, 4);
}

#[test]
fn a_command_that_succeeds_ends_the_stream() {
    let channel = open("exec:tr a-z A-Z");
    send_all(&*channel, b"up").unwrap();
    channel.finish(soon()).unwrap();
    assert_eq!(recv_to_end(&*channel).unwrap(), b"UP");
}

#[test]
fn a_command_that_closes_its_output_early_is_awaited_by_finish() {
    let channel = open("exec:exec >&-; cat > /dev/null; exit 5");
    send_all(&*channel, b"x").unwrap();
    assert_eq!(recv_to_end(&*channel).unwrap(), b"", "still running: no failure yet");
    assert_failed(channel.finish(soon()), "exec >&-; cat > /dev/null; exit 5", 5);
}

#[test]
fn finish_has_a_deadline_and_wait_reports_signals() {
    let channel = ExecChannel::spawn("kill -9 $$").unwrap();
    assert_eq!(channel.wait(soon()).unwrap().and_then(|status| status.signal()), Some(9));
    let channel = ExecChannel::spawn("exec sleep 60").unwrap();
    assert_eq!(channel.wait(Instant::now()).unwrap(), None);
    assert!(matches!(channel.finish(Instant::now()), Err(Error::Timeout { op: "wait for", .. })));
}

#[test]
fn a_command_that_will_not_end_is_ended() {
    let channel = open("exec:trap '' TERM; echo $$; exec sleep 60");
    let mut line = Vec::new();
    while !line.ends_with(b"\n") {
        line.extend(recv_exact(&*channel, 1).unwrap());
    }
    let pid: i32 = String::from_utf8(line).unwrap().trim().parse().unwrap();
    let group = Pid::from_raw(pid).unwrap();
    test_kill_process_group(group).expect("it leads a group");
    drop(channel);
    assert_eq!(test_kill_process_group(group), Err(Errno::SRCH));
}

#[test]
fn a_reader_of_a_silent_command_wakes() {
    let channel = open("exec:exec cat");
    std::thread::scope(|scope| {
        let reader = spawn_asleep(scope, || recv_to_end(&*channel));
        channel.shutdown(Shutdown::Both).unwrap();
        assert_eq!(reader.join().unwrap().unwrap(), b"");
    });
}

#[test]
fn a_listener_starts_its_command_when_it_is_fetched() {
    let directory = tempfile::TempDir::new().unwrap();
    let mark = directory.path().join("mark");
    let command = format!("touch {}; echo in", mark.display());
    let listener = Listener::bind(&Address::Exec(command)).unwrap();
    assert!(!mark.exists());
    let channel = listener.accept(soon(), &cancel()).unwrap();
    assert_eq!(recv_to_end(&*channel).unwrap(), b"in\n");
    assert!(mark.exists());
    assert!(matches!(listener.accept(soon(), &cancel()), Err(Error::Unsupported { .. })));
}
