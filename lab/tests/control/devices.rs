//! Network cards and a vsock device without guests: queried, compared with each other, and quit by command.

use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use serde_json::{Value, json};
use tempfile::TempDir;
use towline_lab::{Finished, Network, Towline, scrape, skip, towline, wait_until};

const WITHIN: Duration = Duration::from_secs(60);

/// A network namespace whose ports are free, and a directory for sockets.
struct Fixture {
    network: Network,
    directory: TempDir,
}

impl Fixture {
    fn path(&self, name: &str) -> String {
        self.directory.path().join(name).display().to_string()
    }

    /// Starts a device with the control socket `NAME.qmp`, and waits for that.
    fn start(&self, name: &str, arguments: &[&str]) -> Towline {
        let (socket, qmp) = (self.path(&format!("{name}.sock")), self.path(&format!("{name}.qmp")));
        let command = [arguments[0], "--socket", &socket, "--qmp", &qmp];
        let words = [&command[..], &arguments[1..]].concat();
        let mut device = Towline::start_after(&self.network.prefix(), &words).unwrap();
        wait_until("a control socket", WITHIN, || {
            assert!(device.runs()?, "it ended: {}", device.stderr());
            Ok(Path::new(&qmp).exists().then_some(()))
        })
        .unwrap();
        device
    }

    fn ctl(&self, name: &str, words: &[&str]) -> Result<Value, String> {
        let socket = self.path(&format!("{name}.qmp"));
        let Finished { status, stdout, stderr } =
            towline([&["ctl", &socket], words].concat()).unwrap().wait(WITHIN).unwrap();
        if status.success() { Ok(serde_json::from_str(&stdout).unwrap()) } else { Err(stderr) }
    }

    /// Exit status of a check, and its output.
    fn check(&self, source: &str, destination: &str) -> (i32, String) {
        let end = |name: &str| match name.split_once(':') {
            Some((scheme, name)) => format!("{scheme}:{}", self.path(name)),
            None => format!("ctl:{}", self.path(&format!("{name}.qmp"))),
        };
        let checked = towline(["check", "--json", &end(source), &end(destination)]).unwrap();
        let Finished { status, stdout, stderr } = checked.wait(WITHIN).unwrap();
        (status.code().unwrap(), format!("{stdout}{stderr}"))
    }
}

fn fixture(name: &str) -> Option<Fixture> {
    match Network::new() {
        Ok(network) => Some(Fixture { network, directory: TempDir::with_prefix("towline-lab-").unwrap() }),
        Err(error) => {
            skip(name, &format!("no separate network: {error:#}"));
            None
        }
    }
}

#[test]
fn a_device_accepts_the_recorded_version_of_another() {
    let Some(fixture) = fixture("a_device_accepts_the_recorded_version_of_another") else { return };
    let a = fixture.start("a", &["net", "--tap", "tap0", "--queues", "2"]);
    let tap = ["ip", "tuntap", "add", "dev", "tap1", "mode", "tap", "vnet_hdr", "multi_queue"];
    fixture.network.run(&tap).unwrap();
    fixture.network.run(&["ip", "link", "set", "tap1", "mtu", "1400", "up"]).unwrap();
    let b = fixture.start("b", &["net", "--tap", "tap1", "--queues", "2"]);
    let _alike = fixture.start("alike", &["net", "--tap", "tap2", "--queues", "2"]);
    let fixed = fixture.start("fixed", &["net", "--tap", "tap3", "--queues", "2", "--unmigratable"]);
    let _vsock = fixture.start("vsock", &["vsock", "--cid", "7"]);

    let version = fixture.ctl("a", &["query-migration-version"]).unwrap();
    assert_eq!(version["type"], "net", "{version}");
    let given =
        |name: &str, version: &Value| fixture.ctl(name, &["check-migration-version", &version.to_string()]);
    assert_eq!(given("alike", &version), Ok(json!({})));
    let refused = given("b", &version).unwrap_err();
    assert!(refused.contains("EINVAL") && refused.contains("MTU"), "{refused}");
    // The reply may precede the log's line.
    wait_until("the detail in the log", WITHIN, || Ok(b.stderr().contains("MTU").then_some(()))).unwrap();
    let other = given("vsock", &version).unwrap_err();
    assert!(other.contains("is of type"), "{other}");
    assert!(fixture.ctl("fixed", &["query-migration-version"]).unwrap_err().contains("ENODEV"));
    assert!(given("fixed", &version).unwrap_err().contains("ENODEV"));

    for (source, destination, code, text) in [
        ("a", "alike", 0, ""),
        ("a", "b", 1, "refuses the source's version: EINVAL"),
        ("a", "vsock", 1, "is of type"),
        ("fixed", "alike", 1, "cannot be migrated"),
        ("a", "fixed", 1, "cannot be migrated"),
        ("vsock", "vsock", 0, ""),
    ] {
        let (found, message) = fixture.check(source, destination);
        assert!(found == code && message.contains(text), "{source} to {destination}: {found} {message}");
    }
    // Hosts that cannot reach each other: the recorded facts are compared with the existing device.
    let facts = fixture.path("a.facts");
    let written =
        towline(["check", "--facts-out", &facts, &format!("ctl:{}", fixture.path("a.qmp"))]).unwrap();
    written.wait_done(WITHIN).unwrap();
    assert_eq!(fixture.check("facts:a.facts", "alike").0, 0);
    assert_eq!(fixture.check("facts:a.facts", "b").0, 1);
    assert_eq!(fixture.check("facts:a.facts", "facts:a.facts").0, 0);

    // The process may have exited before its reply is read.
    let _ = fixture.ctl("fixed", &["quit"]);
    fixed.wait_done(WITHIN).unwrap();
    drop(a);
}

#[test]
fn devices_without_guests_are_queried_and_scraped() {
    let Some(fixture) = fixture("devices_without_guests_are_queried_and_scraped") else { return };
    let net = ["net", "--tap", "tap0", "--queues", "2", "--metrics", "127.0.0.1:9"];
    let _net = fixture.start("net", &net);
    let _vsock = fixture.start("vsock", &["vsock", "--cid", "7", "--metrics", "127.0.0.1:10"]);
    for name in ["net", "vsock"] {
        let status = fixture.ctl(name, &["query-status"]).unwrap();
        assert_eq!(status, json!({ "running": false, "status": "prelaunch" }), "{name}");
    }
    let stats = fixture.ctl("net", &["query-stats", "target=net-queue"]).unwrap();
    let paths: Vec<_> =
        stats.as_array().unwrap().iter().map(|one| one["qom-path"].as_str().unwrap()).collect();
    let queue = |way: &str, queue: u32| format!("/net-queue/tap0/{way}/{queue}");
    assert_eq!(paths, [queue("rx", 0), queue("tx", 0), queue("rx", 1), queue("tx", 1)]);
    let schemas = fixture.ctl("vsock", &["query-stats-schemas"]).unwrap();
    assert_eq!(schemas[0]["target"], "vsock", "{schemas}");
    assert_eq!(fixture.ctl("net", &["set_link", "name=tap0", "up=false"]), Ok(json!({})));
    assert!(fixture.ctl("vsock", &["set_link", "up=false"]).unwrap_err().contains("no link"));

    let metrics = |port: u16| {
        let address = SocketAddr::from(([127, 0, 0, 1], port));
        fixture.network.enter(|| scrape(address, WITHIN)).unwrap().unwrap()
    };
    let card = metrics(9);
    assert_eq!(card.get("towline_net_link{tap=\"tap0\"}"), Some(0.0), "{card:?}");
    let series = "towline_net_queue_bytes_total{tap=\"tap0\",way=\"tx\",queue=\"1\"}";
    assert_eq!(card.get(series), Some(0.0), "{card:?}");
    assert_eq!(metrics(10).get("towline_vsock_connections{guest=\"7\"}"), Some(0.0));
}
