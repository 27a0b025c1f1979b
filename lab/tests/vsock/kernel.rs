//! The kernel's own vsock tests (`tools/testing/vsock`) between two guests that are connected by their CIDs.
//!
//! ```text
//!   guest 33: vsock_test, client ── vsock ── towline ── vsock ── guest 34: vsock_test, server
//!              └────────────── TCP, which synchronises each step of the two ─────────────┘
//! ```
//! Each case is run alone, so one failure does not hide the others. `cargo xtask soak vsock-kernel` builds
//! the programs and runs this; elsewhere it is skipped, since it takes minutes.

use std::fmt;
use std::process::Command;

use tempfile::TempDir;
use towline_lab::{LinuxGuest, Qemu, Towline, Version, paths, require_lab, skip};

use crate::support::{WITHIN, device_arguments, linux_with, shell, start_device, wait_output};

const NAME: &str = "the_kernels_own_tests_pass_between_two_guests";
/// First port of the TCP control connection; each case has its own.
const CONTROL_PORT: u32 = 4000;
/// Maximum buffer size of a socket in the guests.
const SOCKET_BYTES: u64 = 256 << 10;
/// Version of a guest's kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct KernelVersion {
    major: u32,
    minor: u32,
}

impl fmt::Display for KernelVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

const fn linux(major: u32, minor: u32) -> KernelVersion {
    KernelVersion { major, minor }
}

/// Cases that older kernels cannot pass in any set-up: a part of the name, the first kernel that can, and the
/// reason.
const SINCE: [(&str, KernelVersion, &str); 9] = [
    ("invalid receive buffer", linux(6, 2), "errors of a transport unchanged"),
    ("big message", linux(6, 2), "errors of a transport unchanged"),
    ("test invalid buffer", linux(6, 2), "errors of a transport unchanged"),
    ("SOCK_SEQPACKET MSG_PEEK", linux(6, 6), "a peek at a message"),
    ("SHUT_WR", linux(6, 7), "SIGPIPE for vsock"),
    ("SHUT_RD", linux(6, 7), "SIGPIPE for vsock"),
    ("credit update + SO_RCVLOWAT", linux(6, 8), "the credit that SO_RCVLOWAT tells"),
    ("MSG_ZEROCOPY", linux(6, 7), "sends of vsock without a copy"),
    ("SIOCOUTQ", linux(6, 12), "the count of bytes that are not sent"),
];

/// Cases that cannot pass through sockets of the host, which are between the two guests too.
const NOT_HERE: [(&str, &str); 1] =
    [("SHUT_RD", "a Unix socket tells that its other end receives no more when it is sent to, not before")];

/// The two guests: client and server.
struct Pair {
    client: LinuxGuest,
    server: LinuxGuest,
    directory: String,
    _qemus: Vec<Qemu>,
    device: Towline,
    _scratch: TempDir,
}

fn pair() -> Pair {
    let scratch = TempDir::with_prefix("towline-lab-").unwrap();
    let path = |name: String| scratch.path().join(name);
    let directory = paths::lab_directory().join("vsock-tests").display().to_string();
    let programs = ["vsock_test", "vsock_perf"].map(|name| format!("{directory}/{name}"));
    let guest = |cid: u64| format!("cid={cid},socket={},group=kernel", path(format!("d{cid}")).display());
    let [client, server] = [33, 34].map(guest);
    let device = start_device(&["--guest", &client, "--guest", &server], &path("d34".to_owned()));
    let net = path("net".to_owned());
    let start = |cid: u64, server: &str| {
        let card = format!("stream,id=net,server={server},addr.type=unix,addr.path={}", net.display());
        let device = format!("virtio-net-pci,netdev=net,mac=52:54:00:00:00:{cid}");
        let card = ["-netdev", &card, "-device", &device].map(str::to_owned);
        let qemu = linux_with(Version::V10_0, &programs).args(device_arguments(&path(format!("d{cid}"))));
        qemu.args(card).start().unwrap()
    };
    let qemus = vec![start(34, "on"), start(33, "off")];
    let ready = |qemu: &Qemu, cid: u64| {
        let mut guest = qemu.linux(WITHIN).unwrap();
        shell(&mut guest, &format!("ip addr add 10.0.0.{cid}/24 dev eth0 && ip link set eth0 up"));
        guest
    };
    let (server, client) = (ready(&qemus[0], 34), ready(&qemus[1], 33));
    Pair { client, server, directory, _qemus: qemus, device, _scratch: scratch }
}

/// Starts a program in a guest's background; its output and exit status go to a file.
fn begin(guest: &mut LinuxGuest, name: &str, line: &str) {
    shell(guest, &format!("({line}; echo \"exit $?\") > /tmp/{name} 2>&1 & echo"));
}

/// True if both ends exited with success, and their output.
fn outcome(pair: &mut Pair, name: &str) -> (bool, String) {
    let client = wait_output(&mut pair.client, name, "exit ");
    if !client.contains("exit 0") {
        // It would wait for the other end forever.
        let _ = pair.server.shell("busybox killall vsock_test vsock_perf; true", WITHIN);
    }
    let server = wait_output(&mut pair.server, name, "exit ");
    let well = [&client, &server].iter().all(|report| report.contains("exit 0"));
    (well, format!("the client says:\n{client}the server says:\n{server}"))
}

/// Names of the cases, in their order.
fn cases(directory: &str) -> Vec<String> {
    let report = Command::new(format!("{directory}/vsock_test")).arg("--list").output().unwrap();
    let report = String::from_utf8(report.stdout).unwrap();
    let names = report.lines().filter_map(|line| line.split_once('\t')).filter(|(id, _)| *id != "ID");
    names.map(|(_, name)| name.to_owned()).collect()
}

fn kernel(guest: &mut LinuxGuest) -> KernelVersion {
    let version = guest.kernel().unwrap();
    let mut numbers = version.split('.').map(|number| number.parse().unwrap());
    linux(numbers.next().unwrap(), numbers.next().unwrap())
}

#[test]
fn the_kernels_own_tests_pass_between_two_guests() {
    if !require_lab(NAME) {
        return;
    }
    let Ok(mebibytes) = std::env::var("TOWLINE_SOAK_VSOCK_KERNEL_MIB") else {
        return skip(NAME, "it takes minutes; `cargo xtask soak vsock-kernel` runs it");
    };
    let mut pair = pair();
    let kernel = kernel(&mut pair.server);
    let cases = cases(&pair.directory);
    assert!(cases.len() > 20, "{cases:?}");
    let mut failed = Vec::new();
    for (index, name) in cases.iter().enumerate() {
        if let Some(reason) = skip_reason(name, kernel) {
            skip(&format!("{NAME}, {name}"), &reason);
            continue;
        }
        let (well, report) = case(&mut pair, index, cases.len());
        println!("{index:2} {name}: {}", if well { "ok" } else { "FAILED" });
        if !well {
            failed.push(format!("{name}: {report}"));
        }
    }
    assert!(pair.device.runs().unwrap());
    assert!(failed.is_empty(), "{}\n{}", failed.join("\n"), pair.device.stderr());
    bytes(&mut pair, mebibytes.parse::<u64>().unwrap() << 20);
}

/// Returns the reason if a case cannot pass.
fn skip_reason(name: &str, kernel: KernelVersion) -> Option<String> {
    let late = SINCE.iter().find(|(part, since, _)| name.contains(part) && kernel < *since);
    if let Some((_, since, what)) = late {
        return Some(format!("the guest's kernel is {kernel}; {what}: {since}"));
    }
    NOT_HERE.iter().find(|(part, _)| name.contains(part)).map(|(_, reason)| (*reason).to_owned())
}

/// Runs one case of `count`.
fn case(pair: &mut Pair, index: usize, count: usize) -> (bool, String) {
    let others = (0..count).filter(|other| *other != index).map(|other| format!("--skip {other}"));
    let others: Vec<String> = others.collect();
    let port = CONTROL_PORT + u32::try_from(index).unwrap();
    let line = |mode: &str, cid: u64| {
        let common = format!("--control-port {port} --mode {mode} --peer-cid {cid} {}", others.join(" "));
        format!("vsock_test --control-host 10.0.0.34 {common}")
    };
    let (server, client) = (line("server", 33), line("client", 34));
    let name = format!("case{index}");
    begin(&mut pair.server, &name, &server);
    wait_output(&mut pair.server, &name, "listening on");
    begin(&mut pair.client, &name, &client);
    outcome(pair, &name)
}

/// Runs `vsock_perf` both ways; its figures are printed.
fn bytes(pair: &mut Pair, count: u64) {
    for buffer in ["4K", "64K", "256K"] {
        let name = format!("perf{buffer}");
        let perf = format!("vsock_perf --buf-size {buffer}");
        begin(&mut pair.server, &name, &perf);
        // It prints nothing when it listens, so the client is started until it connects.
        let send = format!("{perf} --bytes {count} --sender 34");
        let client = format!("n=0; until {send}; do n=$((n+1)); [ $n -lt 100 ] || exit 1; sleep 0.1; done");
        begin(&mut pair.client, &name, &client);
        let (well, report) = outcome(pair, &name);
        assert!(well, "{report}");
        let number = |what: &str| -> u64 {
            let line = report.lines().find_map(|line| line.strip_prefix(what));
            line.unwrap_or_else(|| panic!("no `{what}`: {report}")).parse().unwrap()
        };
        assert_eq!(number("total bytes sent: "), count);
        // The receiver exits when the sender has ended, and leaves bytes in its socket unread.
        let received = number("total bytes received: ");
        assert!((count - SOCKET_BYTES..=count).contains(&received), "{report}");
        let figures = report.lines().filter(|line| line.contains("performance"));
        println!("writes of {buffer}: {}", figures.collect::<Vec<_>>().join(", "));
    }
}
