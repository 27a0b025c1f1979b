//! Encrypted streams to and from stock QEMUs (`tls-creds-x509`), and every way in which one end rejects the
//! other: an error within seconds, and a guest that runs on.
#![allow(clippy::unwrap_used, reason = "a helper that fails is a test that fails")]

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tempfile::TempDir;
use towline_lab::certificates::{Authority, Holder};
use towline_lab::{
    BootSector, Builder, Finished, Qemu, Towline, Version, require_lab, require_qemu, towline, wait_until,
};

const WITHIN: Duration = Duration::from_secs(60);
/// Time limit of a rejection.
const REFUSES_WITHIN: Duration = Duration::from_secs(30);
const V10_0: Version = Version::V10_0;
const V7_2: Version = Version::V7_2;

/// Directories for the certificates of both ends, and for other files.
struct Fixture {
    authority: Authority,
    directory: TempDir,
}

impl Fixture {
    fn new() -> Self {
        let directory = tempfile::Builder::new().prefix("towline-lab-").tempdir().unwrap();
        let authority = Authority::new("the lab's CA").unwrap();
        for end in ["qemu", "towline"] {
            let at = directory.path().join(end);
            std::fs::create_dir(&at).unwrap();
            authority.furnish(&at).unwrap();
        }
        Self { authority, directory }
    }

    fn path(&self, name: &str) -> String {
        self.directory.path().join(name).to_str().unwrap().to_owned()
    }

    fn end(&self, end: &str) -> PathBuf {
        self.directory.path().join(end)
    }

    /// Builder of a QEMU with an object for TLS.
    fn qemu(&self, version: Version, machine: Version, endpoint: &str) -> Builder {
        // `-cpu max` is not the same in two versions.
        let builder = Qemu::builder(version).machine(machine.machine()).cpu("Nehalem");
        let object = format!("tls-creds-x509,id=tls,dir={},endpoint={endpoint}", self.path("qemu"));
        builder.memory_mib(64).boot_sector(BootSector::default()).args(["-object", &object])
    }

    /// Starts a guest on a QEMU that can connect with TLS, and waits until it counts. On 7.2 it is stopped
    /// then, see [`Version::tracks_emulated_writes`].
    fn boot(&self, version: Version, machine: Version) -> Qemu {
        let qemu = self.qemu(version, machine, "client").start().unwrap();
        qemu.wait_counting(WITHIN).unwrap();
        if version == V7_2 {
            qemu.qmp().execute("stop", Value::Null).unwrap();
        }
        qemu
    }

    /// Starts `towline copy` with its own certificates.
    fn copy(&self, arguments: &[&str]) -> Towline {
        let credentials = self.path("towline");
        towline([&["copy", "--tls-creds", &credentials], arguments].concat()).unwrap()
    }

    fn refused(&self, code: i32, arguments: &[&str]) -> String {
        let begun = Instant::now();
        let finished = self.copy(arguments).wait(WITHIN).unwrap();
        assert_eq!(finished.status.code(), Some(code), "{}{}", finished.stdout, finished.stderr);
        assert!(begun.elapsed() < REFUSES_WITHIN, "{:?}: {}", begun.elapsed(), finished.stderr);
        finished.stderr.replace(self.directory.path().to_str().unwrap(), "DIR")
    }

    /// Stores an image of a guest of this machine type.
    fn image(&self) -> String {
        let (source, image) = (self.boot(V10_0, V10_0), self.path("guest.img"));
        let from = format!("qmp:{}", source.qmp_path().display());
        towline(["copy", &from, &image]).unwrap().wait_done(WITHIN).unwrap();
        image
    }
}

/// Sets up a QEMU as a user would without towline.
fn set(qemu: &Qemu, lanes: u64, tls: &Value) {
    let set = |name, state| json!({ "capability": name, "state": state });
    let capabilities = json!({ "capabilities": [set("multifd", lanes > 0), set("return-path", true)] });
    qemu.qmp().execute("migrate-set-capabilities", capabilities).unwrap();
    let mut parameters = json!({ "multifd-channels": lanes.max(1), "max-bandwidth": 1_u64 << 40 });
    parameters.as_object_mut().unwrap().append(&mut tls.as_object().unwrap().clone());
    qemu.qmp().execute("migrate-set-parameters", parameters).unwrap();
}

/// Waits until a towline listens, and returns its address.
fn listens_at(towline: &mut Towline) -> String {
    towline.listens_at(WITHIN).unwrap()
}

fn wait_stderr(towline: &mut Towline, text: &str) {
    wait_until(text, WITHIN, || {
        assert!(towline.runs()?, "towline ended: {}", towline.stderr());
        Ok(towline.stderr().contains(text).then_some(()))
    })
    .map_err(|error| format!("{error}: {}", towline.stderr()))
    .unwrap();
}

/// Has a waiting QEMU listen; returns its address.
fn listen(qemu: &Qemu, uri: &str) -> String {
    let mut arguments = json!({ "uri": uri });
    if qemu.version() != V7_2 {
        arguments["exit-on-error"] = false.into();
    }
    qemu.qmp().execute("migrate-incoming", arguments).unwrap();
    if uri.starts_with("unix:") {
        return uri.to_owned();
    }
    let message = qemu.qmp().execute("query-migrate", Value::Null).unwrap();
    format!("tcp:127.0.0.1:{}", message["socket-address"][0]["port"].as_str().unwrap())
}

/// Asserts that the destination has the guest, and that it runs on there. A stopped guest is equal in every
/// byte.
fn prove_equal(source: &Qemu, destination: &Qemu) {
    let ran = source.version() != V7_2;
    let loaded = if ran { "running" } else { "paused" };
    destination.qmp().wait_status(loaded, WITHIN).unwrap();
    if ran {
        drop(destination.qmp().execute("stop", Value::Null).unwrap());
    } else {
        assert_eq!(destination.memory_hash().unwrap(), source.memory_hash().unwrap());
    }
    destination.check_filled().unwrap();
    destination.qmp().execute("cont", Value::Null).unwrap();
    assert!(destination.wait_counting(WITHIN).unwrap() > source.counter().unwrap());
}

/// A stock QEMU connects to towline with TLS, and towline to another QEMU.
fn through_towline(version: Version, machine: Version, lanes: u64) {
    from_one_to_another([version, version], machine, lanes);
}

fn from_one_to_another([from, to]: [Version; 2], machine: Version, lanes: u64) {
    let (fixture, count) = (Fixture::new(), lanes.to_string());
    let (image, source) = (fixture.path("guest.img"), fixture.boot(from, machine));
    let mut towline = fixture.copy(&["--multifd-channels", &count, "tcp:127.0.0.1:0", &image]);
    let uri = listens_at(&mut towline);
    set(&source, lanes, &json!({ "tls-creds": "tls" }));
    source.qmp().execute("migrate", json!({ "uri": uri })).unwrap();
    let done = towline.wait(WITHIN).unwrap();
    assert_eq!(done.status.code(), Some(0), "{}", done.stderr);
    source.qmp().wait_migration("completed", WITHIN).unwrap();
    source.qmp().wait_status("postmigrate", WITHIN).unwrap();

    let destination = fixture.qemu(to, machine, "server").incoming_defer().start().unwrap();
    set(&destination, lanes, &json!({ "tls-creds": "tls" }));
    let there = listen(&destination, "tcp:127.0.0.1:0");
    let copied =
        fixture.copy(&["--verify", "--multifd-channels", &count, &image, &there]).wait(WITHIN).unwrap();
    assert_eq!(copied.status.code(), Some(0), "{}{}", copied.stderr, destination.stderr());
    prove_equal(&source, &destination);
}

/// Each release with the newest one; `make test` runs two of them, `cargo xtask soak versions` all.
#[test]
fn the_newest_qemu_and_each_other_one() {
    use Version::{Newest, Stable};
    if !require_qemu("the_newest_qemu_and_each_other_one", &[Stable, Newest]) {
        return;
    }
    let mut crossings = vec![([Stable, Newest], Stable, 4), ([Newest, Newest], Newest, 0)];
    if std::env::var_os("TOWLINE_SOAK_VERSIONS").is_some() {
        let pairs = [
            ([V7_2, Newest], V7_2),
            ([V10_0, Newest], V10_0),
            ([Newest, V10_0], V10_0),
            ([Newest, Stable], Stable),
        ];
        crossings
            .extend(pairs.iter().flat_map(|(pair, machine)| [0, 4].map(|lanes| (*pair, *machine, lanes))));
        crossings.extend([([Stable, Newest], Stable, 0), ([Newest, Newest], Newest, 4)]);
    }
    for (pair, machine, lanes) in crossings {
        from_one_to_another(pair, machine, lanes);
        println!("{:?} to {:?}: TLS, {lanes} lanes: holds", pair[0], pair[1]);
    }
}

macro_rules! tests {
    ($($name:ident: $call:expr;)*) => {$(
        #[test]
        fn $name() {
            if require_lab(stringify!($name)) {
                $call;
            }
        }
    )*};
}

tests! {
    qemu_10_0_and_back_without_lanes: through_towline(V10_0, V10_0, 0);
    qemu_10_0_and_back_with_lanes: through_towline(V10_0, V10_0, 4);
    qemu_10_0_and_back_as_an_old_machine: through_towline(V10_0, V7_2, 2);
    qemu_7_2_and_back_without_lanes: through_towline(V7_2, V7_2, 0);
    qemu_7_2_and_back_with_lanes: through_towline(V7_2, V7_2, 4);
    two_towlines_carry_a_guest: two_towlines();
    a_qemu_that_is_not_trusted_or_does_not_trust_runs_on: sources();
    a_destination_that_is_not_trusted_or_does_not_trust_is_named: destinations();
}

/// A towline on each host drives its QEMU by QMP.
fn two_towlines() {
    let (fixture, source) = (Fixture::new(), Fixture::new().boot(V10_0, V10_0));
    let destination = fixture.qemu(V10_0, V10_0, "server").incoming_defer().start().unwrap();
    let to = format!("qmp:{}", destination.qmp_path().display());
    let mut far = fixture.copy(&["--multifd-channels", "2", "tcp:127.0.0.1:0", &to]);
    let uri = listens_at(&mut far);
    let from = format!("qmp:{}", source.qmp_path().display());
    let near = fixture.copy(&["--multifd-channels", "2", &from, &uri]).wait(WITHIN).unwrap();
    assert_eq!(near.status.code(), Some(0), "{}", near.stderr);
    let far = far.wait(WITHIN).unwrap();
    assert_eq!(far.status.code(), Some(0), "{}", far.stderr);
    prove_equal(&source, &destination);
}

/// A QEMU connects to a listening towline. It fails, its guest runs on, and towline reports the reason and
/// keeps listening.
fn sources() {
    let at_good = |_: &Fixture| {};
    let spoil_ca =
        |fixture: &Fixture| Authority::new("another CA").unwrap().furnish(&fixture.end("qemu")).unwrap();
    let expire = |fixture: &Fixture| {
        let expired = Holder { until: 2011, ..Holder::SERVER };
        fixture.authority.issue(&fixture.end("towline"), expired).unwrap();
    };
    let without_client = |fixture: &Fixture| {
        for name in ["client-cert.pem", "client-key.pem"] {
            std::fs::remove_file(fixture.end("qemu").join(name)).unwrap();
        }
    };
    let right_behind = "it ended the connection right after the handshake: it may not accept";
    type Case<'a> = (&'a str, &'a dyn Fn(&Fixture), Value, &'a str);
    let cases: [Case<'_>; 5] = [
        ("wrong CA", &spoil_ca, json!({ "tls-creds": "tls" }), "TLS with tcp:127.0.0.1:"),
        ("expired", &expire, json!({ "tls-creds": "tls" }), right_behind),
        ("wrong name", &at_good, json!({ "tls-creds": "tls", "tls-hostname": "other.lab" }), right_behind),
        (
            "no client certificate",
            &without_client,
            json!({ "tls-creds": "tls" }),
            "it sent no client certificate",
        ),
        (
            "no TLS",
            &at_good,
            json!({ "tls-creds": "" }),
            "it sent a migration without TLS: turn TLS on there",
        ),
    ];
    for (name, spoil, tls, text) in cases {
        for lanes in [0, 2] {
            let fixture = Fixture::new();
            spoil(&fixture);
            let (count, image) = (lanes.to_string(), fixture.path("guest.img"));
            let mut towline = fixture.copy(&["--multifd-channels", &count, "tcp:127.0.0.1:0", &image]);
            let uri = listens_at(&mut towline);
            let source = fixture.boot(V10_0, V10_0);
            set(&source, lanes, &tls);
            fails_and_runs_on(&source, &uri, &mut towline, text);
            println!("{name}, {lanes} lanes: {}", towline.stderr());
            assert!(!Path::new(&image).exists());
        }
    }
    // TLS where none is expected.
    let fixture = Fixture::new();
    let mut plain = towline(["copy", "tcp:127.0.0.1:0", &fixture.path("guest.img")]).unwrap();
    let uri = listens_at(&mut plain);
    let source = fixture.boot(V10_0, V10_0);
    set(&source, 0, &json!({ "tls-creds": "tls" }));
    fails_and_runs_on(&source, &uri, &mut plain, "it begins with TLS: turn TLS on here");
}

fn fails_and_runs_on(source: &Qemu, uri: &str, towline: &mut Towline, text: &str) {
    let begun = Instant::now();
    // QEMU itself may refuse it at once.
    let _ = source.qmp().execute("migrate", json!({ "uri": uri }));
    wait_stderr(towline, text);
    source.qmp().wait_migration("failed", WITHIN).unwrap();
    assert!(begun.elapsed() < REFUSES_WITHIN, "{:?}", begun.elapsed());
    assert_eq!(source.qmp().status().unwrap(), "running");
    source.wait_counting(WITHIN).unwrap();
}

/// Towline connects to a QEMU that waits.
fn destinations() {
    let fixture = Fixture::new();
    let image = fixture.image();
    let waiting = |fixture: &Fixture, tls: &Value| {
        let destination = fixture.qemu(V10_0, V10_0, "server").incoming_defer().start().unwrap();
        set(&destination, 0, tls);
        destination
    };
    let with_tls = || json!({ "tls-creds": "tls" });
    let refuse = |destination: &Qemu, options: &[&str], text: &str| {
        let there = listen(destination, "tcp:127.0.0.1:0");
        let message = fixture.refused(1, &[options, &[&image, &there]].concat());
        println!("{message}");
        assert!(message.contains(text) && message.contains(&there), "{message}");
        assert!(message.contains("the guest: in its image, which is as it was"), "{message}");
    };
    let name = "not for \"other.lab\": name the host that it is for (--tls-hostname)";
    refuse(&waiting(&fixture, &with_tls()), &["--tls-hostname", "other.lab"], name);
    let no_tls = "in the handshake: either it does not speak TLS (tls-creds at the destination's QEMU)";
    refuse(&waiting(&fixture, &json!({})), &[], no_tls);

    let destination = waiting(&fixture, &with_tls());
    let there = listen(&destination, "tcp:127.0.0.1:0");
    let plain = towline(["copy", &image, &there]).unwrap().wait(WITHIN).unwrap();
    assert_eq!(plain.status.code(), Some(1), "{}", plain.stderr);
    println!("plain to TLS: {}", plain.stderr);

    for name in ["client-cert.pem", "client-key.pem"] {
        std::fs::remove_file(fixture.end("towline").join(name)).unwrap();
    }
    let wanted = "it may want a client certificate, and there is no DIR/towline/client-cert.pem";
    refuse(&waiting(&fixture, &with_tls()), &[], wanted);

    fixture.authority.furnish(&fixture.end("towline")).unwrap();
    fixture.authority.issue(&fixture.end("qemu"), Holder { until: 2011, ..Holder::SERVER }).unwrap();
    // QEMU itself accepts no expired certificate.
    let expired = fixture.qemu(V10_0, V10_0, "server").incoming_defer().start();
    assert!(expired.is_err_and(|error| format!("{error:#}").contains("expired")));

    Authority::new("another CA").unwrap().furnish(&fixture.end("qemu")).unwrap();
    let unknown = "its server certificate is not signed by the CA of DIR/towline/ca-cert.pem";
    refuse(&waiting(&fixture, &with_tls()), &[], unknown);
}

#[test]
fn endpoints_without_tls_are_refused() {
    let fixture = Fixture::new();
    let refused = |arguments: &[&str]| fixture.refused(2, arguments);
    let message = refused(&["qmp:/nowhere", "qmp:/elsewhere"]);
    assert!(
        message.starts_with("towline: --tls-creds is for a stream (tcp:, unix:), and neither end is one"),
        "{message}"
    );
    let message = refused(&["a.img", "exec:cat"]);
    assert!(
        message.starts_with("towline: --tls-creds with exec:cat: only tcp:, unix: and wss:// support TLS"),
        "{message}"
    );
    let message = refused(&["a.img", "unix:/nowhere"]);
    assert!(message.contains("give that of its certificate with --tls-hostname"), "{message}");
    let message = refused(&["--tls-hostname", "x", "tcp:127.0.0.1:0", "a.img"]);
    assert!(message.contains("--tls-hostname is the name of a destination"), "{message}");
    let lanes = ["--zero-copy-send", "on", "--multifd-channels", "2", "a.img", "tcp:127.0.0.1:1"];
    let message = refused(&lanes);
    assert!(message.contains("--zero-copy-send on: --tls-creds encrypts a copy of every page"), "{message}");
    std::fs::remove_file(fixture.end("towline").join("ca-cert.pem")).unwrap();
    let message = fixture.refused(1, &["a.img", "tcp:127.0.0.1:1"]);
    assert!(
        message.starts_with("towline: TLS credentials, DIR/towline/ca-cert.pem: No such file"),
        "{message}"
    );
    let finished: Finished =
        towline(["copy", "--tls-hostname", "x", "a.img", "tcp:127.0.0.1:1"]).unwrap().wait(WITHIN).unwrap();
    assert_eq!(finished.status.code(), Some(2), "{}", finished.stderr);
}

/// The commands in docs/tls.md create certificates that both ends accept.
#[test]
fn the_documented_commands_make_good_certificates() {
    let documentation = std::fs::read_to_string(towline_lab::paths::workspace().join("docs/tls.md")).unwrap();
    let (_, lines) = documentation.split_once("```sh\n").unwrap();
    let (lines, _) = lines.split_once("```").unwrap();
    let directory = tempfile::Builder::new().prefix("towline-lab-").tempdir().unwrap();
    let mut shell = std::process::Command::new("sh");
    let made = shell.args(["-ec", lines]).env("HOST", "localhost").current_dir(directory.path()).output();
    let made = made.unwrap();
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let credentials = directory.path().to_str().unwrap();
    let copy = |arguments: &[&str]| {
        let options = ["copy", "--tls-creds", credentials, "--multifd-channels", "2"];
        towline([&options[..], arguments].concat()).unwrap()
    };
    let mut far = copy(&["tcp:127.0.0.1:0", "mem:"]);
    let port = listens_at(&mut far).rsplit_once(':').unwrap().1.to_owned();
    copy(&["mem:16M", &format!("tcp:localhost:{port}")]).wait_done(WITHIN).unwrap();
    far.wait_done(WITHIN).unwrap();
}
