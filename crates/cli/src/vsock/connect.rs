//! `towline vsock connect`: standard input and output as a connection to a port of a guest.
//!
//! ```text
//!   standard input ── thread: copy, then shut down ──► socket ──► device ──► guest
//!   standard output ◄── copy, then close ───────────── socket
//! ```
//! The process ends when both directions have ended, or when the guest has closed the connection. With
//! `--pass-fd` it ends at once, and its parent has the socket.

use std::io::{self, BufRead as _, BufReader, ErrorKind, Read as _, Write as _};
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread::Builder;
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow, bail};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{Shutdown, shutdown};
use towline_channel::{Error as ChannelError, inherit};

use crate::args::{ConnectArgs, ConnectTarget};
use crate::console::{wait_for, write_all};
use crate::exit::{Exit, UsageError};
use crate::sockets::send_with;

/// Time limit of a device for its reply. Its guest may take 10 seconds of them.
const REPLY_TIMEOUT: Duration = Duration::from_secs(30);
/// Maximum length of the reply `OK PORT`.
const REPLY_BYTES_MAX: u64 = 32;
/// Descriptor of standard output.
const STDOUT: i32 = 1;
const COPY_BYTES: usize = 64 << 10;
/// Interval of checks whether the guest has closed the connection while standard input is idle.
const CLOSED_INTERVAL: Duration = Duration::from_millis(200);

/// Runs the command.
pub(super) fn run(args: &ConnectArgs) -> Result<Exit> {
    let connection = connect(args)?;
    if args.pass_fd {
        pass(&connection)?;
        return Ok(Exit::Done);
    }
    copy(&connection)?;
    Ok(Exit::Done)
}

/// Returns a connected socket.
fn connect(args: &ConnectArgs) -> Result<OwnedFd> {
    match &args.target {
        ConnectTarget::Device(path) => {
            let Some(port) = args.port else {
                let text = "no port: give the guest's port behind the socket of its device";
                bail!(UsageError(text.into()));
            };
            Ok(connect_device(path, port)?.into())
        }
        ConnectTarget::Unix(path) => {
            let place = path.display();
            let stream = UnixStream::connect(path).map_err(|error| {
                anyhow!("cannot connect to {place}: {error}; start `towline vsock --forward unix:{place}=guest:PORT`")
            })?;
            Ok(stream.into())
        }
        ConnectTarget::Tcp(address) => {
            let stream = TcpStream::connect(address).map_err(|error| {
                anyhow!("cannot connect to {address}: {error}; start `towline vsock --forward tcp:{address}=guest:PORT`")
            })?;
            stream.set_nodelay(true)?;
            Ok(stream.into())
        }
    }
}

/// Connects to a port of a guest by the handshake of its device.
fn connect_device(path: &Path, port: u32) -> Result<UnixStream> {
    let place = path.display();
    let mut stream = UnixStream::connect(path).map_err(|error| {
        anyhow!("cannot connect to {place}: {error}; start a device with `towline vsock --uds {place}`")
    })?;
    stream.set_read_timeout(Some(REPLY_TIMEOUT))?;
    let asked = stream.write_all(format!("CONNECT {port}\n").as_bytes());
    let reply = match asked {
        // As a socket that is closed after the request.
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(None),
        asked => asked.and_then(|()| read_reply(&stream)),
    };
    let reply = reply.map_err(|error| match error.kind() {
        ErrorKind::WouldBlock => {
            io::Error::new(ErrorKind::TimedOut, "no reply in 30 s; is the guest running?")
        }
        _ => error,
    });
    let reply = reply.with_context(|| format!("the device at {place} failed"))?;
    match reply.as_deref() {
        None => bail!(
            "port {port} of the guest at {place} refused the connection; start the guest, and a program that listens on \
             that vsock port, or name the socket of its vsock device (`--uds`), if this is another one"
        ),
        Some(line) if line.starts_with("OK ") => {}
        Some(line) => bail!(
            "{place}: received {line:?} in place of `OK PORT`; it is not the socket of a vsock device (for a listener of \
             a rule say unix:{place})"
        ),
    }
    stream.set_read_timeout(None)?;
    Ok(stream)
}

/// Reads the reply of a device and not one byte more. `None`: it has closed the socket.
fn read_reply(stream: &UnixStream) -> io::Result<Option<String>> {
    let mut line = Vec::new();
    // It reads on after a stop of the process (Ctrl-Z), which interrupts a read with a time limit.
    match BufReader::with_capacity(1, stream).take(REPLY_BYTES_MAX).read_until(b'\n', &mut line) {
        Err(error) if !matches!(error.kind(), ErrorKind::ConnectionReset | ErrorKind::BrokenPipe) => {
            Err(error)
        }
        Ok(1..) => Ok(Some(String::from_utf8_lossy(&line).trim_end_matches('\n').to_owned())),
        _ => Ok(None),
    }
}

/// Sends the socket over standard output.
fn pass(connection: &OwnedFd) -> Result<()> {
    send_with(io::stdout(), &[0], connection.as_fd())
        .context("--pass-fd: standard output accepts no socket; with ssh, set `ProxyUseFdpass yes`")
}

/// Copies both directions until they have ended.
fn copy(connection: &OwnedFd) -> Result<()> {
    let (ended, to_guest) = channel();
    let sending = connection.try_clone()?;
    Builder::new().spawn(move || ended.send(send(&sending))).map_err(ChannelError::NoThread)?;
    let stdout = inherit(STDOUT)?;
    copy_all(connection.as_fd(), stdout.as_fd()).context("the connection to the guest failed")?;
    // Its reader sees the end, and may end standard input then.
    drop(stdout);
    let sent = wait(connection, &to_guest);
    sent.context("the guest has not received all of standard input")
}

/// Copies standard input to the socket, and then ends that direction.
fn send(connection: &OwnedFd) -> io::Result<()> {
    copy_all(io::stdin().as_fd(), connection.as_fd())?;
    match shutdown(connection, Shutdown::Write) {
        // The guest has closed the connection.
        Ok(()) | Err(Errno::NOTCONN) => Ok(()),
        Err(errno) => Err(errno.into()),
    }
}

/// Waits until standard input has ended or failed, or the guest has closed the connection.
fn wait(connection: &OwnedFd, to_guest: &Receiver<io::Result<()>>) -> io::Result<()> {
    loop {
        match to_guest.recv_timeout(CLOSED_INTERVAL) {
            Ok(result) => return result,
            Err(RecvTimeoutError::Timeout) if is_closed(connection)? => return Ok(()),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return Err(io::Error::other("a thread has panicked")),
        }
    }
}

/// Copies until the end of `from`.
fn copy_all(from: BorrowedFd<'_>, to: BorrowedFd<'_>) -> io::Result<()> {
    let mut bytes = vec![0; COPY_BYTES];
    loop {
        let count = match rustix::io::read(from, &mut bytes[..]) {
            Ok(0) => return Ok(()),
            Ok(count) => count,
            Err(Errno::INTR) => continue,
            Err(Errno::AGAIN) => {
                wait_for(from, PollFlags::IN)?;
                continue;
            }
            Err(errno) => return Err(errno.into()),
        };
        write_all(to, &bytes[..count])?;
    }
}

/// Returns true if the other end has stopped sending and receiving.
fn is_closed(connection: &OwnedFd) -> io::Result<bool> {
    let mut fds = [PollFd::new(connection, PollFlags::empty())];
    poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }))?;
    Ok(fds[0].revents().intersects(PollFlags::HUP | PollFlags::ERR))
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;
    use std::process::{Command, Stdio};
    use std::time::Instant;

    use rustix::process::{Pid, Signal, kill_process};

    use super::*;

    /// Set in the process that connects: the socket.
    const CONNECTS: &str = "TOWLINE_TEST_CONNECTS";

    #[test]
    fn a_process_that_was_stopped_meanwhile_gets_its_reply() {
        if let Some(path) = std::env::var_os(CONNECTS) {
            connect_device(Path::new(&path), 22).unwrap();
            return;
        }
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("v.sock");
        let device = UnixListener::bind(&path).unwrap();
        let mut command = Command::new(std::env::current_exe().unwrap());
        let name = "vsock::connect::tests::a_process_that_was_stopped_meanwhile_gets_its_reply";
        let mut child =
            command.args(["--exact", name]).env(CONNECTS, &path).stdout(Stdio::null()).spawn().unwrap();
        let (mut client, _) = device.accept().unwrap();
        client.read_exact(&mut [0; b"CONNECT 22\n".len()]).unwrap();
        let pid = Pid::from_child(&child);
        wait_for_state(child.id(), 'S');
        kill_process(pid, Signal::STOP).unwrap();
        wait_for_state(child.id(), 'T');
        kill_process(pid, Signal::CONT).unwrap();
        // It has ended if its read has failed.
        let _ = client.write_all(b"OK 22\n");
        assert!(child.wait().unwrap().success());
    }

    /// Waits until each thread of a process sleeps (`S`), or is stopped (`T`).
    fn wait_for_state(pid: u32, state: char) {
        let deadline = Instant::now() + Duration::from_secs(60);
        let has_state = |thread: std::fs::DirEntry| {
            let stat = std::fs::read_to_string(thread.path().join("stat")).unwrap_or_default();
            stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with(state))
        };
        while !std::fs::read_dir(format!("/proc/{pid}/task")).unwrap().flatten().all(has_state) {
            assert!(Instant::now() < deadline, "process {pid} has a thread of another state than {state}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}
