//! A copy that is queried, changed and cancelled under way, by `towline ctl`, by a QMP client and by QEMU's
//! own `qmp-shell`; and its metrics.

use std::io::Write;
use std::net::{SocketAddr, TcpListener};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

use serde_json::{Value, json};
use tempfile::TempDir;
use towline_lab::{
    BootSector, Qemu, Qmp, Towline, Version, paths, require_lab, scrape, skip, towline, wait_until,
};

const WITHIN: Duration = Duration::from_secs(60);
/// A rate at which 16 MiB would take the whole day.
const CRAWLING: &str = "200";

struct Fixture {
    source: Qemu,
    directory: TempDir,
    /// Port that was free when the directory was made.
    metrics: SocketAddr,
}

impl Fixture {
    fn new() -> Self {
        let guest = Qemu::builder(Version::V10_0).memory_mib(64).boot_sector(BootSector::default());
        let source = guest.start().unwrap();
        source.wait_counting(WITHIN).unwrap();
        let metrics = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        Self { source, directory: TempDir::new().unwrap(), metrics }
    }

    fn path(&self, name: &str) -> String {
        self.directory.path().join(name).display().to_string()
    }

    /// Starts a copy into an image that would never end; returns when memory is sent.
    fn copy(&self) -> Towline {
        let (qmp, from) = (self.path("ctl.sock"), format!("qmp:{}", self.source.qmp_path().display()));
        let (image, metrics) = (self.path("guest.img"), self.metrics.to_string());
        // Without lanes: with them, QEMU exceeds its bandwidth limit.
        let slowly = ["--multifd-channels", "0", "--max-bandwidth", CRAWLING, "--resume"];
        let options = [&slowly[..], &["--qmp", &qmp, "--metrics", &metrics]].concat();
        let mut towline = towline([&["copy", &from, &image][..], &options].concat()).unwrap();
        wait_until("a copy that moves", WITHIN, || {
            assert!(towline.runs()?, "{}", towline.stderr());
            let client = Qmp::connect(self.directory.path().join("ctl.sock").as_path(), WITHIN);
            let answer = client.and_then(|client| client.execute("query-migrate", Value::Null));
            let moves = |answer: &Value| answer["status"] == "active" && answer["ram"]["total"] != 0;
            Ok(answer.is_ok_and(|answer| moves(&answer)).then_some(()))
        })
        .unwrap();
        towline
    }

    fn ctl(&self, words: &[&str]) -> Value {
        let finished = towline([&["ctl", &self.path("ctl.sock")], words].concat()).unwrap();
        let finished = finished.wait_done(WITHIN).unwrap();
        serde_json::from_str(&finished.stdout).unwrap()
    }

    fn qmp(&self) -> Qmp {
        Qmp::connect(self.directory.path().join("ctl.sock").as_path(), WITHIN).unwrap()
    }
}

#[test]
fn a_copy_is_queried_and_its_bandwidth_raised() {
    if !require_lab("a_copy_is_queried_and_its_bandwidth_raised") {
        return;
    }
    let fixture = Fixture::new();
    let towline = fixture.copy();
    let found = fixture.ctl(&["query-migrate"]);
    assert_eq!(found["status"], "active", "{found}");
    assert!(found["ram"]["remaining"].as_u64() > Some(0), "{found}");
    assert!(found["ram"]["total"].as_u64() >= Some(64 << 20), "{found}");
    let scraped = scrape(fixture.metrics, WITHIN).unwrap();
    assert_eq!(scraped.get("towline_migration_running"), Some(1.0), "{scraped:?}");
    assert_eq!(scraped.get("towline_migration_ended"), Some(0.0), "{scraped:?}");
    assert!(scraped.get("towline_migration_ram_bytes") >= Some(f64::from(64 << 20)), "{scraped:?}");
    assert!(scraped.get("towline_migration_transferred_bytes_total") > Some(0.0), "{scraped:?}");
    assert_eq!(fixture.ctl(&["migrate-set-parameters", "max-bandwidth=0", "downtime-limit=500"]), json!({}));
    let finished = towline.wait(WITHIN).unwrap();
    assert!(finished.status.success(), "{}", finished.stderr);
    assert!(!PathBuf::from(fixture.path("ctl.sock")).exists(), "a stale control socket");
    fixture.source.wait_counting(WITHIN).unwrap();
    // Settings changed under way are restored like all others.
    let parameters = fixture.source.qmp().execute("query-migrate-parameters", Value::Null).unwrap();
    assert_eq!(
        (&parameters["downtime-limit"], &parameters["max-bandwidth"]),
        (&json!(300), &json!(134_217_728))
    );
}

#[test]
fn a_copy_is_cancelled_over_its_socket() {
    if !require_lab("a_copy_is_cancelled_over_its_socket") {
        return;
    }
    let fixture = Fixture::new();
    let towline = fixture.copy();
    let refused = fixture.qmp().execute("migrate-set-parameters", json!({ "multifd-channels": 4 }));
    assert!(refused.unwrap_err().to_string().contains("multifd-channels"), "lanes cannot change under way");
    assert_eq!(fixture.ctl(&["migrate_cancel"]), json!({}));
    let finished = towline.wait(WITHIN).unwrap();
    assert_eq!(finished.status.code(), Some(1), "{}", finished.stderr);
    assert!(finished.stderr.contains("the guest: safe at its source"), "{}", finished.stderr);
    fixture.source.wait_counting(WITHIN).unwrap();
    assert!(!PathBuf::from(fixture.path("guest.img")).exists());
    let ended = towline_ctl_fails(&fixture);
    assert!(ended.contains("ctl.sock"), "{ended}");
}

/// Output of a `ctl` that must fail: no process listens at its socket.
fn towline_ctl_fails(fixture: &Fixture) -> String {
    let finished =
        towline(["ctl", &fixture.path("ctl.sock"), "query-migrate"]).unwrap().wait(WITHIN).unwrap();
    assert_eq!(finished.status.code(), Some(1), "{}", finished.stderr);
    finished.stderr
}

/// QEMU's own client, which has no special support of towline.
#[test]
fn qmp_shell_works_unchanged() {
    let python = paths::lab_directory().join("python-qmp/bin/python");
    if !require_lab("qmp_shell_works_unchanged") {
        return;
    }
    if !python.is_file() {
        skip(
            "qmp_shell_works_unchanged",
            &format!("{} is missing; run `cargo xtask setup`", python.display()),
        );
        return;
    }
    let fixture = Fixture::new();
    let towline = fixture.copy();
    // As a module: the script of that name contains the path in which its environment was created.
    let mut child = Command::new(python)
        .args(["-m", "qemu.qmp.qmp_shell"])
        .arg(fixture.path("ctl.sock"))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = "query-migrate\nmigrate-set-parameters max-bandwidth=400\nmigrate_cancel\n";
    child.stdin.take().unwrap().write_all(lines.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    for wanted in ["Connected to QEMU", "\"status\": \"active\"", "\"return\": {}"] {
        assert!(
            text.contains(wanted),
            "{wanted:?} is not in {text}{}",
            String::from_utf8_lossy(&output.stderr)
        );
    }
    let finished = towline.wait(WITHIN).unwrap();
    assert_eq!(finished.status.code(), Some(1), "{}", finished.stderr);
}
