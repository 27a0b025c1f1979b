//! A guest with a vsock device, and programs at both ends: `socat` and Perl in the guest, sockets here.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

use tempfile::TempDir;
use towline_lab::{Kernel, LinuxGuest, MemoryBackend, Qemu, Towline, Version, towline, wait_until};

pub(crate) const WITHIN: Duration = Duration::from_secs(120);
pub(crate) const CID: u64 = 33;

/// Sockets in Perl, which needs no module for them: `perl v.pl listen|connect stream|seqpacket PORT MODE`.
///
/// echo: sends back all bytes. answer: sends the number of received bytes at their end. silent: accepts and
/// never reads. late: reads when `/tmp/goPORT` is there, and prints the number of reads. messages: prints the
/// length of each message. ask: sends its arguments, shuts down, and prints the reply.
const PERL: &str = r#"
$| = 1; $SIG{CHLD} = 'IGNORE'; $SIG{PIPE} = 'IGNORE';
my ($way, $kind, $port, $mode, @rest) = @ARGV;
my $type = $kind eq 'stream' ? 1 : 5;
sub address { pack('SSLLx4', 40, 0, $_[1], $_[0]) }
sub say_all { my ($s, $b) = @_; while (length $b) { my $n = syswrite($s, $b); return 0 unless defined $n; $b = substr($b, $n) } 1 }
sub serve {
  my ($s) = @_; my $b; my $total = 0; my $reads = 0;
  if ($mode eq 'silent') { sleep 1000 }
  if ($mode eq 'late') { select(undef, undef, undef, 0.05) until -e "/tmp/go$port" }
  while (1) {
    my $n = sysread($s, $b, 262144);
    if (!defined $n) { print "failed $!\n"; return }
    last if $n == 0;
    $total += $n; $reads++;
    if ($mode eq 'echo') { say_all($s, $b) or do { print "failed $!\n"; return } }
    if ($mode eq 'messages') { my $m = "$n"; syswrite($s, $m) }
  }
  say_all($s, "received $total") if $mode eq 'answer';
  print "reads $reads\n" if $mode eq 'late';
  print "ended $total\n";
}
socket(my $s, 40, $type, 0) or die "socket $!";
if ($way eq 'listen') {
  bind($s, address(0xffffffff, $port)) or die "bind $!";
  listen($s, 128) or die "listen $!";
  print "listening\n";
  while (accept(my $c, $s)) { if (!fork) { close $s; serve($c); exit } close $c }
  die "accept $!";
}
connect($s, address($ENV{CID} || 2, $port)) or do { print "refused $!\n"; exit };
if ($mode eq 'ask') {
  syswrite($s, $_) for @rest; shutdown($s, 1);
  my ($b, $all) = ('', ''); while (my $n = sysread($s, $b, 65536)) { $all .= $b } print "answered $all\n";
} elsif ($mode eq 'write') {
  my $b = 'x' x 65536; while (syswrite($s, $b)) {} print "failed $!\n";
} else { serve($s) }
"#;

/// A guest, its device, and a directory for their sockets.
pub(crate) struct Fixture {
    pub(crate) guest: LinuxGuest,
    _qemu: Qemu,
    pub(crate) version: Version,
    pub(crate) device: Towline,
    pub(crate) scratch: TempDir,
}

/// Arguments of QEMU for a device whose process listens at `socket`.
pub(crate) fn device_arguments(socket: &Path) -> [String; 4] {
    [
        "-chardev".to_owned(),
        format!("socket,id=vsock,path={}", socket.display()),
        "-device".to_owned(),
        "vhost-user-vsock-pci,id=vsock0,chardev=vsock".to_owned(),
    ]
}

pub(crate) fn linux(version: Version) -> towline_lab::Builder {
    linux_with(version, &["/usr/bin/socat", "/usr/bin/perl"])
}

/// Builder of a Linux whose memory is shared with a device, with these programs of this machine.
pub(crate) fn linux_with(version: Version, programs: &[impl AsRef<Path>]) -> towline_lab::Builder {
    let builder = Qemu::builder(version).memory_backend(MemoryBackend::Memfd { prealloc: false });
    builder.linux().guest_programs(programs.iter().map(AsRef::as_ref))
}

/// Starts `towline vsock` and waits until it listens.
pub(crate) fn start_device(arguments: &[&str], socket: &Path) -> Towline {
    let device = towline([&["vsock"], arguments].concat()).unwrap();
    wait_until("the device's socket", WITHIN, || Ok(socket.exists().then_some(()))).unwrap();
    device
}

impl Fixture {
    pub(crate) fn new(version: Version, more: &[&str]) -> Self {
        Self::with_kernel(version, Kernel::Debian12, more)
    }

    pub(crate) fn with_kernel(version: Version, kernel: Kernel, more: &[&str]) -> Self {
        let scratch = TempDir::with_prefix("towline-lab-").unwrap();
        let socket = scratch.path().join("device");
        let [device_path, uds, messages] =
            ["device", "v", "m"].map(|name| scratch.path().join(name).display().to_string());
        let cid = CID.to_string();
        let own = ["--socket", &device_path, "--cid", &cid, "--uds", &uds, "--uds-seqpacket", &messages];
        let device = start_device(&[&own[..], more].concat(), &socket);
        let (qemu, mut guest) =
            linux(version).kernel(kernel).args(device_arguments(&socket)).boot(WITHIN).unwrap();
        install_perl(&mut guest);
        Self { guest, _qemu: qemu, version, device, scratch }
    }

    pub(crate) fn uds(&self) -> PathBuf {
        self.scratch.path().join("v")
    }

    pub(crate) fn shell(&mut self, line: &str) -> String {
        shell(&mut self.guest, line)
    }

    /// Runs the Perl program in the guest's background; its output goes to a file.
    pub(crate) fn perl(&mut self, name: &str, arguments: &str) {
        perl(&mut self.guest, name, arguments);
    }

    /// Waits until the output of a program in the guest contains `what`.
    pub(crate) fn wait_output(&mut self, name: &str, what: &str) -> String {
        wait_output(&mut self.guest, name, what)
    }

    /// Listens for the guest's connections to `port`.
    pub(crate) fn listen(&self, port: u32) -> UnixListener {
        UnixListener::bind(self.scratch.path().join(format!("v_{port}"))).unwrap()
    }

    /// Connects to a port of the guest.
    pub(crate) fn connect(&self, port: u32) -> UnixStream {
        connect(&self.uds(), port)
    }
}

pub(crate) fn shell(guest: &mut LinuxGuest, line: &str) -> String {
    guest.shell(line, WITHIN).unwrap().trim().to_owned()
}

pub(crate) fn install_perl(guest: &mut LinuxGuest) {
    let escaped = PERL.replace('\\', "\\\\").replace('\'', "'\\''").replace('\n', "\\n").replace('%', "%%");
    shell(guest, &format!("printf '{escaped}' > /tmp/v.pl; perl -c /tmp/v.pl"));
}

pub(crate) fn perl(guest: &mut LinuxGuest, name: &str, arguments: &str) {
    shell(guest, &format!("perl /tmp/v.pl {arguments} > /tmp/{name} 2>&1 & echo"));
    if arguments.starts_with("listen") {
        wait_output(guest, name, "listening");
    }
}

pub(crate) fn wait_output(guest: &mut LinuxGuest, name: &str, what: &str) -> String {
    let text = wait_until(&format!("`{what}` of {name}"), WITHIN, || {
        let text = guest.shell(&format!("touch /tmp/{name}; cat /tmp/{name}"), WITHIN)?;
        Ok(text.contains(what).then_some(text))
    });
    match text {
        Ok(text) => text,
        Err(error) => {
            let text = shell(guest, &format!("cat /tmp/{name}; dmesg | tail -5"));
            panic!("{error:#}: output: {text}");
        }
    }
}

pub(crate) fn patient(stream: UnixStream) -> UnixStream {
    stream.set_read_timeout(Some(WITHIN)).unwrap();
    stream.set_write_timeout(Some(WITHIN)).unwrap();
    stream
}

/// Sends CONNECT and reads OK, byte by byte. Retries if it is refused: the guest's program may not listen
/// yet, or its backlog may be full.
pub(crate) fn connect(uds: &Path, port: u32) -> UnixStream {
    let connected = wait_until("a listener in the guest that accepts", WITHIN, || {
        let mut stream = patient(UnixStream::connect(uds)?);
        stream.write_all(format!("CONNECT {port}\n").as_bytes())?;
        Ok(read_ok(&mut stream).then_some(stream))
    });
    connected.unwrap()
}

/// Reads the OK line, and not one byte more.
pub(crate) fn expect_ok(stream: &mut UnixStream) {
    assert!(read_ok(stream), "closed without an answer");
}

/// Returns false if the connection was closed instead. Any other reply is a failure.
fn read_ok(stream: &mut UnixStream) -> bool {
    let mut line = Vec::new();
    BufReader::with_capacity(1, stream).read_until(b'\n', &mut line).unwrap();
    let line = String::from_utf8(line).unwrap();
    let port = line.strip_prefix("OK ").and_then(|rest| rest.strip_suffix('\n'));
    assert!(line.is_empty() || port.is_some_and(|port| port.parse::<u32>().is_ok()), "received {line:?}");
    !line.is_empty()
}

/// Reads until the end of the stream.
pub(crate) fn read_all(stream: &mut UnixStream) -> Vec<u8> {
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes).unwrap();
    bytes
}
