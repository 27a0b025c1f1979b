//! Output that is not read or cannot be written: the copy continues, signals work, and the exit status is a
//! documented one.

use std::io::{PipeReader, PipeWriter, Write as _};
use std::process::Stdio;
use std::time::Instant;

use rustix::process::Signal;
use towline_lab::{Qemu, Terminal, Towline, require_lab, towline_binary, wait_until};

use crate::support::{
    SAFE, SLOW, WITHIN, assert_runs, assert_waits, counting, guest, qmp, signal, wait_soon, waiting,
};

/// A pipe of one page with `free` free bytes, which is not read while its reader is kept.
fn small_pipe(free: usize) -> (PipeReader, PipeWriter) {
    let (reader, mut writer) = std::io::pipe().unwrap();
    let size = rustix::pipe::fcntl_setpipe_size(&writer, 4096).unwrap();
    writer.write_all(&vec![b'.'; size - free]).unwrap();
    (reader, writer)
}

/// A pipe whose reader is closed.
fn broken_pipe() -> Stdio {
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    writer.into()
}

fn start(line: &str, output: [Stdio; 2]) -> Towline {
    Towline::start_with(&towline_binary().unwrap(), line.split(' '), Some(output), &[]).unwrap()
}

fn wait_under_way(source: &Qemu) {
    source.qmp().wait_migration("active", WITHIN).unwrap();
}

/// Moves a guest and runs `under_way` during the move; the guest must arrive.
#[track_caller]
fn assert_moved(options: &str, output: [Stdio; 2], under_way: impl FnOnce(&Towline)) {
    let (source, destination) = (counting(guest()), waiting(&guest()));
    let towline = start(&format!("move {options} {SLOW} {} {}", qmp(&source), qmp(&destination)), output);
    wait_under_way(&source);
    under_way(&towline);
    assert_runs(&destination);
    let finished = towline.wait(WITHIN).unwrap();
    assert_eq!(finished.status.code(), Some(0), "{}", finished.status);
    source.wait_exit(WITHIN).unwrap();
}

/// Cancels a copy under way with these outputs; the source runs on.
#[track_caller]
fn assert_cancelled(options: &str, output: [Stdio; 2], by: Signal, under_way: impl FnOnce(&Towline)) {
    let (source, destination) = (counting(guest()), waiting(&guest()));
    let towline = start(&format!("copy {options} {SLOW} {} {}", qmp(&source), qmp(&destination)), output);
    wait_under_way(&source);
    under_way(&towline);
    let since = Instant::now();
    signal(towline.pid(), by);
    let finished = wait_soon(towline, since);
    assert_eq!(finished.status.code(), Some(SAFE), "{}", finished.status);
    assert_runs(&source);
    assert_waits(&destination);
}

/// Free bytes that the next event does not fit into, so a blocking write would hang: the phases before memory
/// is sent take about 160 bytes.
const ROOM: usize = 300;

#[test]
fn a_guest_is_moved_while_events_are_not_read() {
    if !require_lab("a_guest_is_moved_while_events_are_not_read") {
        return;
    }
    let (_reader, writer) = small_pipe(ROOM);
    assert_moved("--json", [writer.into(), Stdio::null()], |_| ());
}

#[test]
fn a_copy_is_cancelled_while_events_are_not_read() {
    if !require_lab("a_copy_is_cancelled_while_events_are_not_read") {
        return;
    }
    let (_reader, writer) = small_pipe(ROOM);
    assert_cancelled("--json", [writer.into(), Stdio::null()], Signal::TERM, |_| ());
}

/// The message about the signal is not read either.
#[test]
fn a_copy_is_cancelled_while_standard_error_is_not_read() {
    if !require_lab("a_copy_is_cancelled_while_standard_error_is_not_read") {
        return;
    }
    let (_reader, writer) = small_pipe(0);
    assert_cancelled("--json --log debug", [Stdio::null(), writer.into()], Signal::INT, |_| ());
}

#[test]
fn a_guest_is_moved_while_its_terminal_is_stopped() {
    if !require_lab("a_guest_is_moved_while_its_terminal_is_stopped") {
        return;
    }
    let terminal = Terminal::open().unwrap();
    let output = [terminal.output().unwrap(), terminal.output().unwrap()];
    assert_moved("--log debug", output, |_| terminal.stop_output().unwrap());
}

#[test]
fn a_copy_is_cancelled_while_its_terminal_is_stopped() {
    if !require_lab("a_copy_is_cancelled_while_its_terminal_is_stopped") {
        return;
    }
    let terminal = Terminal::open().unwrap();
    let output = [terminal.output().unwrap(), terminal.output().unwrap()];
    assert_cancelled("--paused", output, Signal::HUP, |_| terminal.stop_output().unwrap());
}

#[test]
fn broken_pipes_neither_end_a_copy_nor_block_its_signals() {
    if !require_lab("broken_pipes_neither_end_a_copy_nor_block_its_signals") {
        return;
    }
    assert_moved("--log debug", [broken_pipe(), broken_pipe()], |_| ());
    for (options, by) in [("--json", Signal::TERM), ("--log debug", Signal::INT)] {
        assert_cancelled(options, [broken_pipe(), broken_pipe()], by, |_| ());
    }
}

/// A notice is written early, before anything is sent.
#[test]
fn a_notice_that_cannot_be_written_ends_nothing() {
    if !require_lab("a_notice_that_cannot_be_written_ends_nothing") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("stream");
    let line = format!("copy unix:{} null:", socket.display());
    let mut towline = start(&line, [broken_pipe(), broken_pipe()]);
    wait_until("a towline that listens", WITHIN, || {
        assert!(towline.runs()?, "it has ended");
        Ok(std::os::unix::net::UnixStream::connect(&socket).ok())
    })
    .unwrap();
    let since = Instant::now();
    signal(towline.pid(), Signal::TERM);
    assert_eq!(wait_soon(towline, since).status.code(), Some(SAFE));
}
