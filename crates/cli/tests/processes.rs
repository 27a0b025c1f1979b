//! The program under a service manager: notifications, socket activation, confinement.
#![allow(clippy::unwrap_used, reason = "tests, with their helpers")]

use std::io::{Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

const TOWLINE: &str = env!("CARGO_BIN_EXE_towline");
const TIMEOUT: Duration = Duration::from_secs(120);

/// A directory, and in it the socket of a service manager.
struct Manager {
    directory: tempfile::TempDir,
    socket: UnixDatagram,
}

impl Manager {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let socket = UnixDatagram::bind(directory.path().join("notify")).unwrap();
        socket.set_read_timeout(Some(TIMEOUT)).unwrap();
        Self { directory, socket }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn start(&self, command: &mut Command) -> Process {
        command.env("NOTIFY_SOCKET", self.path("notify"));
        Process(command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap())
    }

    /// Expects the next notification to begin with this text.
    fn expect(&self, wanted: &str) {
        let mut bytes = [0; 400];
        let length =
            self.socket.recv(&mut bytes).unwrap_or_else(|error| panic!("no notification {wanted}: {error}"));
        let notification = String::from_utf8_lossy(&bytes[..length]);
        assert!(notification.starts_with(wanted), "{notification:?}, expected {wanted:?}");
    }
}

/// Killed at the end of the test.
struct Process(Child);

impl Process {
    /// Returns a field of every thread's status.
    fn status(&self, key: &str) -> Vec<String> {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", self.0.id())).unwrap();
        // A thread may have ended.
        let texts = tasks.filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("status")).ok());
        let value = |text: String| {
            let line = text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':').map(str::trim));
            line.unwrap_or_default().to_owned()
        };
        texts.map(value).collect()
    }

    /// Waits for its end.
    fn wait(&mut self) -> ExitStatus {
        let until = Instant::now() + TIMEOUT;
        loop {
            if let Some(status) = self.0.try_wait().unwrap() {
                return status;
            }
            assert!(Instant::now() < until, "the process does not end");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Sends SIGTERM. Returns the exit status and standard error.
    fn end(mut self) -> (Option<i32>, String) {
        signal(&self.0, "-TERM");
        let mut stderr = String::new();
        self.0.stderr.take().unwrap().read_to_string(&mut stderr).unwrap();
        (self.0.wait().unwrap().code(), stderr)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn signal(process: &Child, name: &str) {
    let sent = Command::new("sh")
        .args(["-c", "kill \"$@\"", "sh", name, &process.id().to_string()])
        .status()
        .unwrap();
    assert!(sent.success(), "kill {name}");
}

fn vsock(socket: &Path) -> Command {
    let mut command = Command::new(TOWLINE);
    command.args(["vsock", "--cid", "7", "--socket"]).arg(socket);
    command
}

#[test]
fn a_device_is_ready_confined_and_ends_in_order() {
    let manager = Manager::new();
    let socket = manager.path("vsock.sock");
    let uds = manager.path("uds");
    let rule = format!("unix:{}=guest:80", manager.path("port").display());
    let device = manager.start(vsock(&socket).args(["--forward", &rule, "--uds"]).arg(&uds));
    manager.expect("READY=1\nSTATUS=guests: 1\n");
    UnixStream::connect(&socket).unwrap();
    assert!(device.status("Seccomp").iter().all(|mode| mode == "2"), "{:?}", device.status("Seccomp"));
    assert!(device.status("NoNewPrivs").iter().all(|set| set == "1"));
    let (code, stderr) = device.end();
    manager.expect("STOPPING=1\n");
    assert_eq!(code, Some(0), "{stderr}");
    let (stopping, statistics) = stderr.split_once('\n').unwrap();
    assert_eq!(
        stopping,
        "towline: SIGTERM: stopping; the connections of the guests are closed; a second SIGINT or SIGTERM ends towline at once: \
         without statistics, and its sockets remain"
    );
    assert!(statistics.starts_with("towline: cid=7") && statistics.ends_with('\n'), "{statistics}");
    for made in [socket, uds, manager.path("port")] {
        assert!(!made.exists(), "{}", made.display());
    }
}

/// Landlock restricts only threads that are started later.
#[test]
fn every_thread_of_a_device_with_observers_is_confined() {
    let manager = Manager::new();
    let [socket, qmp] = ["vsock.sock", "qmp"].map(|name| manager.path(name));
    let options = ["--metrics", "127.0.0.1:0", "--sandbox", "on", "--log", "info", "--qmp"];
    let device = manager.start(vsock(&socket).args(options).arg(&qmp));
    manager.expect("READY=1\nSTATUS=guests: 1\n");
    let mut greeting = [0; 8];
    UnixStream::connect(&qmp).unwrap().read_exact(&mut greeting).unwrap();
    assert!(greeting.starts_with(b"{"), "{greeting:?}");
    assert!(device.status("Seccomp").iter().all(|mode| mode == "2"), "{:?}", device.status("Seccomp"));
    let (code, stderr) = device.end();
    assert_eq!(code, Some(0), "{stderr}");
    assert!(!stderr.contains("the sandbox"), "{stderr}");
    assert!(!socket.exists() && !qmp.exists());
}

/// Output into a pipe that is full, and into one that is closed.
#[test]
fn a_device_ends_in_order_without_a_reader_of_its_output() {
    let manager = Manager::new();
    for name in ["-TERM", "-HUP"] {
        let (_reader, mut full) = std::io::pipe().unwrap();
        let size = rustix::pipe::fcntl_setpipe_size(&full, 4096).unwrap();
        full.write_all(&vec![b'.'; size]).unwrap();
        let (reader, broken) = std::io::pipe().unwrap();
        drop(reader);
        for [stdout, stderr] in [[full.try_clone().unwrap(), full], [broken.try_clone().unwrap(), broken]] {
            let socket = manager.path("vsock.sock");
            let mut command = Command::new(TOWLINE);
            command.args(["vsock", "--cid", "7", "--log", "debug", "--socket"]).arg(&socket);
            command.env("NOTIFY_SOCKET", manager.path("notify")).stdout(stdout).stderr(stderr);
            let mut device = Process(command.spawn().unwrap());
            manager.expect("READY=1\n");
            signal(&device.0, "-USR1");
            signal(&device.0, name);
            assert_eq!(device.wait().code(), Some(0));
            manager.expect("STOPPING=1\n");
            assert!(!socket.exists());
        }
    }
}

/// Signals are held while another host is prepared. Here the source's monitor never answers.
#[test]
fn a_move_that_is_cancelled_while_it_is_prepared_reports_that() {
    let manager = Manager::new();
    let socket = manager.path("a.qmp");
    let monitor = UnixListener::bind(&socket).unwrap();
    let mut command = Command::new(TOWLINE);
    command.args(["move", &format!("qmp:{}", socket.display()), "ssh:nowhere"]).stderr(Stdio::piped());
    let mut moving = Process(command.spawn().unwrap());
    let (_client, _) = monitor.accept().unwrap();
    signal(&moving.0, "-INT");
    let status = moving.wait();
    let mut stderr = String::new();
    moving.0.stderr.take().unwrap().read_to_string(&mut stderr).unwrap();
    assert_eq!(status.code(), Some(1), "{status}: {stderr}");
    assert!(stderr.contains("cancelled"), "{stderr}");
}

#[test]
fn completions_succeed_without_a_reader() {
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let output = Command::new(TOWLINE).args(["completions", "bash"]).stdout(writer).output().unwrap();
    assert_eq!((output.status.code(), output.stderr.as_slice()), (Some(0), &b""[..]));
}

#[test]
fn a_devices_socket_has_the_requested_permissions() {
    let manager = Manager::new();
    let socket = manager.path("vsock.sock");
    let group = rustix::process::getegid().as_raw().to_string();
    let device = manager.start(vsock(&socket).args(["--socket-group", &group]));
    manager.expect("READY=1\n");
    assert_eq!(std::fs::metadata(&socket).unwrap().mode() & 0o777, 0o660);
    assert_eq!(device.end().0, Some(0));
    manager.expect("STOPPING=1\n");
    let output = Command::new(TOWLINE)
        .args(["vsock", "--cid", "7", "--fd", "0", "--socket-group", &group])
        .output()
        .unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    assert!(stderr.contains("--socket-group is for a socket at --socket PATH"), "{stderr}");
}

#[test]
fn the_sandbox_can_be_disabled() {
    let manager = Manager::new();
    let device = manager.start(vsock(&manager.path("vsock.sock")).args(["--sandbox", "none"]));
    manager.expect("READY=1\n");
    assert!(device.status("Seccomp").iter().all(|mode| mode == "0"));
    assert_eq!(device.end().0, Some(0));
}

#[test]
fn a_device_listens_on_the_socket_of_its_manager() {
    let manager = Manager::new();
    let path = manager.path("vsock.sock");
    let listener = UnixListener::bind(&path).unwrap();
    let mut command = Command::new("/bin/sh");
    let script = r#"LISTEN_FDS=1 LISTEN_PID=$$ exec "$0" vsock --cid 7 3<&0 </dev/null"#;
    command.args(["-c", script, TOWLINE]).stdin(Stdio::from(OwnedFd::from(listener)));
    let device = manager.start(&mut command);
    drop(command);
    manager.expect("READY=1\n");
    UnixStream::connect(&path).unwrap();
    let (code, stderr) = device.end();
    assert_eq!(code, Some(0), "{stderr}");
    assert!(path.exists(), "the socket belongs to the manager");
}

#[test]
fn a_copy_is_ready_when_it_listens() {
    let manager = Manager::new();
    let socket = manager.path("stream");
    let source = format!("unix:{}", socket.display());
    let copy = manager.start(Command::new(TOWLINE).args(["copy", &source, "null:"]));
    manager.expect(&format!("READY=1\nSTATUS=waiting for a guest at {source}\n"));
    assert!(socket.exists());
    assert!(copy.status("Seccomp").iter().all(|mode| mode == "2"));
    let (code, stderr) = copy.end();
    manager.expect("STOPPING=1\n");
    assert_eq!(code, Some(1), "{stderr}");
}

#[test]
fn log_lines_of_a_copy_begin_with_its_id() {
    let directory = tempfile::tempdir().unwrap();
    let missing = directory.path().join("none.img");
    let mut command = Command::new(TOWLINE);
    let output = command
        .args(["copy", "--json", "--log", "debug"])
        .arg(&missing)
        .arg(directory.path().join("copy.img"))
        .output()
        .unwrap();
    let begun = String::from_utf8(output.stdout).unwrap();
    let begun = begun.lines().next().unwrap();
    let id = begun.split('"').find(|word| word.len() == 16 && word.chars().all(|c| c.is_ascii_hexdigit()));
    let id = id.unwrap_or_else(|| panic!("no id in {begun}"));
    assert!(begun.contains(r#""event":"begun""#), "{begun}");
    let stderr = String::from_utf8(output.stderr).unwrap();
    for line in stderr.lines().filter(|line| !line.starts_with("towline: ")) {
        assert!(line.starts_with(id), "{line}");
    }
    assert_eq!(output.status.code(), Some(1), "{stderr}");
}

/// Runs a copy into memory of the same process with this log filter. Returns standard error and the exit
/// status.
fn logged(filter: &str) -> (String, Option<i32>) {
    let directory = tempfile::tempdir().unwrap();
    let mut command = Command::new(TOWLINE);
    let command = command.args(["copy", "--quiet", "--log", filter, "mem:4M"]);
    let output = command.arg(directory.path().join("guest.img")).output().unwrap();
    (String::from_utf8(output.stderr).unwrap(), output.status.code())
}

#[test]
fn a_log_has_the_phases_and_at_debug_the_decisions() {
    let (info, code) = logged("info");
    assert_eq!(code, Some(0), "{info}");
    assert!(info.contains("phase prepare") && info.contains("phase release"), "{info}");
    assert!(!info.contains("options of the copy") && !info.contains('\u{1b}'), "{info}");
    let (debug, _) = logged("debug");
    assert!(debug.contains("options of the copy, with defaults lanes=4"), "{debug}");
    let (wrong, code) = logged("debgu");
    assert_eq!(code, Some(2), "{wrong}");
    assert!(
        wrong.contains("--log debgu: \"debgu\" is not a level: expected a level (error, warn,"),
        "{wrong}"
    );
}

/// Standard error of a command that fails, and its exit status.
fn failed(directory: &Path, arguments: &[&str]) -> (String, Option<i32>) {
    let output = Command::new(TOWLINE).current_dir(directory).args(arguments).output().unwrap();
    (String::from_utf8(output.stderr).unwrap(), output.status.code())
}

#[test]
fn a_cause_is_printed_once_and_the_closing_line_is_true() {
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    let (stderr, code) = failed(directory, &["copy", "none.img", "x.img"]);
    assert_eq!(
        (stderr.as_str(), code),
        (
            "towline: none.img: No such file or directory (os error 2)\n\
             towline: the guest: not touched; its image could not be opened\n",
            Some(1)
        )
    );
    let (stderr, _) = failed(directory, &["inspect", "none.img"]);
    assert_eq!(stderr, "towline: none.img: No such file or directory (os error 2)\n");
    drop(UnixListener::bind(directory.join("a.sock")).unwrap());
    for command in [&["inspect", "a.sock"][..], &["copy", "a.sock", "x.img"]] {
        let (stderr, _) = failed(directory, command);
        assert!(stderr.contains(
            "a.sock: a Unix socket, not an image; a QEMU is named by its QMP socket, as qmp:a.sock"
        ));
    }
    let (stderr, _) =
        failed(directory, &["net", "--socket", "none/x.sock", "--tap", "x", "--sandbox", "none"]);
    assert_eq!(stderr.matches("none is not a directory; create it").count(), 1, "{stderr}");
    let (stderr, _) = failed(directory, &["copy", "mem:4M", "a.img"]);
    assert!(stderr.is_empty(), "{stderr}");
    let file = std::fs::File::options().write(true).open(directory.join("a.img")).unwrap();
    std::os::unix::fs::FileExt::write_at(&file, b"damage", 2_000_000).unwrap();
    let (stderr, code) = failed(directory, &["inspect", "--verify", "a.img"]);
    assert_eq!((stderr.matches("its BLAKE3 is").count(), code), (1, Some(1)), "{stderr}");
}

/// As libvirt writes it: a header of 92 bytes, the domain's description, QEMU's stream.
fn libvirt_save(stream: &[u8], compression: u8) -> Vec<u8> {
    let description = b"<domain type='qemu'><name>a</name></domain>\0";
    let mut file = b"LibvirtQemudSave".to_vec();
    for number in [2, description.len() as u32, 1, u32::from(compression), 0] {
        file.extend(number.to_ne_bytes());
    }
    file.resize(92, 0);
    [&file, &description[..], stream].concat()
}

#[test]
fn a_file_of_virsh_save_becomes_an_image() {
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    let path = |name: &str| directory.join(name);
    assert_eq!(failed(directory, &["copy", "--quiet", "mem:8M", "guest.img"]).1, Some(0));
    let send = ["copy", "--quiet", "--return-path", "off", "guest.img", "exec:cat > guest.stream"];
    assert_eq!(failed(directory, &send), (String::new(), Some(0)));
    let stream = std::fs::read(path("guest.stream")).unwrap();
    std::fs::write(path("vm.save"), libvirt_save(&stream, 0)).unwrap();
    let (stderr, code) = failed(directory, &["copy", "vm.save", "again.img"]);
    assert_eq!(code, Some(0), "{stderr}");
    let blocks = |name: &str| {
        let output =
            Command::new(TOWLINE).current_dir(directory).args(["inspect", "--json", name]).output().unwrap();
        let facts = serde_json::from_slice::<serde_json::Value>(&output.stdout).unwrap();
        (facts["blocks"].clone(), facts["devices"].clone())
    };
    assert_eq!(blocks("again.img"), blocks("guest.img"));
    let (stderr, code) = failed(directory, &["inspect", "vm.save"]);
    assert_eq!(code, Some(0), "{stderr}");
    // A name that its source chose cannot write to the terminal.
    let mut named = stream.clone();
    for at in 0..named.len() - 8 {
        if named[at..].starts_with(b"\x07mem.ram") {
            named[at + 1..at + 8].copy_from_slice(b"me\n\x1bram");
        }
    }
    std::fs::write(path("named.save"), libvirt_save(&named, 0)).unwrap();
    let output =
        Command::new(TOWLINE).current_dir(directory).args(["inspect", "named.save"]).output().unwrap();
    let (shown, errors) =
        (String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap());
    assert!(shown.contains(r"me\n\u{1b}ram") && !shown.contains('\x1b'), "{shown}{errors}");
    // Its guest is where it was, also after a failure.
    std::fs::write(path("short.save"), libvirt_save(&stream[..stream.len() / 2], 0)).unwrap();
    let (stderr, code) = failed(directory, &["copy", "short.save", "short.img"]);
    assert!(code == Some(1) && stderr.contains("the guest: in its image, which is as it was"), "{stderr}");
    std::fs::write(path("zstd.save"), libvirt_save(&stream, 5)).unwrap();
    let (stderr, code) = failed(directory, &["copy", "zstd.save", "x.img"]);
    assert!(code == Some(1) && stderr.contains("| zstd -dc'"), "{stderr}");
}

#[test]
fn a_copy_writes_a_report_about_itself() {
    let directory = tempfile::tempdir().unwrap();
    let line = ["copy", "--quiet", "--report", "copy.html", "mem:64M,dirty=4M", "guest.img"];
    let (stderr, code) = failed(directory.path(), &line);
    assert_eq!((stderr.as_str(), code), ("", Some(0)));
    let page = std::fs::read_to_string(directory.path().join("copy.html")).unwrap();
    for part in ["<!doctype html>", "mem:64M,dirty=4M to file:guest.img", "stored, synced", "transfer"] {
        assert!(page.contains(part), "{part}: {page}");
    }
    // A failed copy has one too.
    let (_, code) = failed(directory.path(), &["copy", "--report", "none.html", "none.img", "x.img"]);
    let page = std::fs::read_to_string(directory.path().join("none.html")).unwrap();
    assert!(code == Some(1) && page.contains("No such file or directory"), "{page}");
}

#[test]
fn missing_options_are_usage_errors() {
    let output = Command::new(TOWLINE).args(["net", "--tap", "none"]).output().unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    assert!(stderr.contains("give --socket PATH or --fd N, or use socket activation"), "{stderr}");
    let output =
        Command::new(TOWLINE).args(["copy", "--log", "towline=loud", "a", "null:"]).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
}

/// Without a filter, which names modules, a warning is for people.
#[test]
fn a_warning_names_its_module_only_with_a_filter() {
    for (options, expected) in [
        (&[][..], "towline: cannot notify the service manager"),
        (&["--log", "warn"], " WARN towline::notify: cannot notify the service manager"),
    ] {
        let mut command = Command::new(TOWLINE);
        command.args(["copy", "mem:4M", "mem:"]).args(options).env_remove("TOWLINE_LOG");
        let output = command.env("NOTIFY_SOCKET", "/no/directory/notify").output().unwrap();
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(0), "{stderr}");
        assert!(stderr.contains(expected), "{stderr}");
    }
}
