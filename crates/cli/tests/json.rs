//! Events of `--json`: all that can be produced without a QEMU, validated by the schema, and their shapes.
#![allow(clippy::unwrap_used, reason = "tests, with their helpers")]

mod common;

use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use common::schema::EventSchema;
use common::snapshot::Snapshots;
use serde_json::{Value, json};
use tempfile::TempDir;

const TIMEOUT: Duration = Duration::from_secs(120);
/// Events that need a QEMU, a guest, a tap or an interrupted move; the lab has tests of them.
const ELSEWHERE: [&str; 19] = [
    "hosts",
    "move",
    "unreadable",
    "guest",
    "starting",
    "running",
    "ended",
    "run",
    "instant",
    "recorded",
    "takes-over",
    "protected",
    "checkpoints",
    "unprotected",
    "protection-ended",
    "resumed",
    "undecided",
    "statistics",
    "inspected, qemu",
];

/// Runs towline in a directory, and collects its events.
struct Events {
    directory: TempDir,
    events: Vec<Value>,
}

impl Events {
    fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_towline"));
        command.args(words).arg("--json").current_dir(self.directory.path());
        command.env("XDG_RUNTIME_DIR", self.directory.path()).env_remove("TOWLINE_LOG");
        command
    }

    /// Runs a command to its end with this exit status. Returns its last event.
    fn run(&mut self, words: &[&str], status: i32) -> Value {
        let output = self.command(words).output().unwrap();
        assert_eq!(output.status.code(), Some(status), "{words:?}: {}", text(&output.stderr));
        self.add(&output)
    }

    /// Adds the events of a command, the last of which has its exit status. Returns that.
    fn add(&mut self, output: &Output) -> Value {
        let lines = text(&output.stdout);
        self.events.extend(lines.lines().map(|line| serde_json::from_str::<Value>(line).unwrap()));
        let last = self.events.last().unwrap().clone();
        assert_eq!(last["exit"].as_i64(), output.status.code().map(i64::from), "{last}");
        let is_success = last["outcome"] == "done";
        assert_eq!(is_success, output.status.success(), "{last}");
        if last["event"] == "failed" {
            let stderr = text(&output.stderr);
            let error = last["error"].as_str().unwrap().lines().next().unwrap().to_owned();
            assert!(stderr.contains(&error), "{error}: {stderr}");
        }
        last
    }

    fn start(&self, words: &[&str]) -> Child {
        self.command(words).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    }

    fn write(&self, name: &str, content: &str) {
        std::fs::write(self.directory.path().join(name), content).unwrap();
    }

    /// Writes a stream as `virsh save` does: after a header, here without a description of the domain.
    fn write_saved(&self, stream: &str, name: &str) {
        let mut content = b"LibvirtQemudSave".to_vec();
        content.extend(2_u32.to_ne_bytes());
        content.resize(92, 0);
        content.extend(std::fs::read(self.directory.path().join(stream)).unwrap());
        std::fs::write(self.directory.path().join(name), content).unwrap();
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn wait_for(path: &Path) {
    let deadline = Instant::now() + TIMEOUT;
    while !path.exists() {
        assert!(Instant::now() < deadline, "{} does not exist", path.display());
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn events_follow_the_schema_and_have_their_recorded_shape() {
    let mut towline = Events { directory: tempfile::tempdir().unwrap(), events: Vec::new() };
    copies(&mut towline);
    stores(&mut towline);
    store_verbs(&mut towline);
    other_commands(&mut towline);
    early_failures(&mut towline);

    let schema = EventSchema::load(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")).unwrap();
    let mut shapes = BTreeMap::new();
    for event in &towline.events {
        schema.validate(event).unwrap_or_else(|error| panic!("{error}\n{event}"));
        // The host may have undecided moves of others.
        if !ELSEWHERE.contains(&EventSchema::title(event).as_str()) {
            shapes.entry(EventSchema::title(event)).or_insert_with(|| schema.shape(event));
        }
    }
    let mut snapshots = Snapshots::open("events");
    for (title, shape) in &shapes {
        snapshots.compare(&format!("{}.json", title.replace(", ", "-")), &format!("{shape:#}\n"));
    }
    snapshots.finish();
    let missing: Vec<_> = schema.titles().into_iter().filter(|title| !shapes.contains_key(title)).collect();
    let expected: Vec<_> =
        schema.titles().into_iter().filter(|title| ELSEWHERE.contains(&title.as_str())).collect();
    assert_eq!(missing, expected);
}

#[test]
fn the_schema_in_docs_is_that_of_the_types() {
    let output = Command::new(env!("CARGO_BIN_EXE_towline")).arg("--print-schema").output().unwrap();
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/schema/events.json");
    assert!(
        text(&output.stdout) == std::fs::read_to_string(path).unwrap(),
        "docs/schema/events.json is stale; write it again: cargo run -p towline-cli -- --print-schema > docs/schema/events.json"
    );
}

fn copies(towline: &mut Events) {
    // Zero-copy sends depend on the kernel.
    let done = towline.run(&["copy", "--zero-copy-send", "off", "mem:8M", "a.img"], 0);
    assert_eq!((&done["source-state"], &done["destination-state"]), (&json!("unchanged"), &json!("stored")));
    let all = towline.run(&["copy", "a.img", "b.img", "c.img"], 0);
    assert_eq!((&all["event"], &all["outcome"]), (&json!("all"), &json!("done")));
    let failed = towline.run(&["copy", "none.img", "d.img"], 1);
    assert_eq!((&failed["guest-state"]["source"], &failed["reason"]), (&json!("unknown"), &json!("image")));
    // It reads a guest from somewhere, which need not be a QEMU.
    let failed = towline.run(&["copy", "--return-path", "off", "exec:exit 3", "d.img"], 1);
    assert_eq!(failed["guest-state"]["source"], "unknown", "{failed}");
    let usage = towline.run(&["copy", "null:", "d.img"], 2);
    assert_eq!((&usage["outcome"], &usage["reason"]), (&json!("usage"), &json!("usage")));

    let receiver = towline.start(&["copy", "unix:stream", "mem:"]);
    wait_for(&towline.directory.path().join("stream"));
    towline.run(&["copy", "a.img", "unix:stream"], 0);
    let received = receiver.wait_with_output().unwrap();
    assert!(received.status.success(), "{}", text(&received.stderr));
    let received = towline.add(&received);
    assert_eq!(
        (&received["source-state"], &received["destination-state"]),
        (&json!("unknown"), &json!("received"))
    );
    assert!(received["memory"]["verified-pages"].is_u64(), "{received}");
}

fn stores(towline: &mut Events) {
    towline.run(&["copy", "a.img", "store:images/a"], 0);
    assert_eq!(towline.run(&["inspect", "--verify", "store:images/a"], 0)["kind"], "stored-image");
    towline.run(&["copy", "mem:8M,seed=7", "other.img"], 0);
    towline.run(&["copy", "--overwrite", "other.img", "store:images/a"], 0);
    for options in [&["--dry-run"][..], &[]] {
        let found =
            towline.run(&[&["store", "gc", "--min-age", "0"], options, &["store:images"]].concat(), 0);
        assert!(found["garbage"]["objects"].as_u64().unwrap() > 0, "{found}");
    }
}

fn store_verbs(towline: &mut Events) {
    towline.run(&["copy", "--base", "a.img", "mem:8M,seed=9", "increment.img"], 0);
    for place in ["store:images", "."] {
        for verb in ["ls", "du", "verify"] {
            let listed = towline.run(&["store", verb, place], 0);
            assert!(listed["images"].as_u64() >= Some(1) && listed["outcome"] == "done", "{listed}");
        }
    }
    let end = towline.run(&["store", "rm", "a.img"], 1);
    assert_eq!((&end["event"], &end["unreadable"]), (&json!("images"), &json!(1)), "{end}");
    let refused = &towline.events[towline.events.len() - 2];
    assert!(refused["error"].as_str().unwrap().contains("increment.img is based on it"), "{refused}");
    towline.run(&["store", "rm", "increment.img"], 0);
    let removed = &towline.events[towline.events.len() - 2];
    assert!(removed["event"] == "removed-image" && removed["freed"].as_u64() > Some(0), "{removed}");
    towline.run(&["store", "rm", "store:images/a"], 0);
    let collected = towline.run(&["store", "gc", "--min-age", "0", "store:images"], 0);
    assert!(collected["garbage"]["objects"].as_u64() > Some(0), "{collected}");
    towline.write(".old.img.partial", "p");
    assert!(towline.run(&["store", "gc", "."], 0)["bytes"].as_u64() > Some(0));
    assert!(!towline.directory.path().join(".old.img.partial").exists());
}

fn other_commands(towline: &mut Events) {
    assert_eq!(towline.run(&["inspect", "--verify", "a.img"], 0)["verified"], true);
    towline.run(&["inspect", "--html", "page.html", "a.img", "a.img"], 0);
    let page = std::fs::read_to_string(towline.directory.path().join("page.html")).unwrap();
    for part in ["compared with", "chunks of 2.00 MiB", "<rect class=\"shared\"", "<h2>Devices</h2>"] {
        assert!(page.contains(part), "{part}: {page}");
    }
    assert!(!page.contains("another state"), "{page}");
    let sent = towline.run(&["copy", "--return-path", "off", "a.img", "exec:cat > stream.bin"], 0);
    assert_eq!((&sent["source-state"], &sent["destination-state"]), (&json!("unchanged"), &json!("sent")));
    let stored = towline.run(&["copy", "--return-path", "off", "exec:cat stream.bin", "again.img"], 0);
    assert_eq!(
        (&stored["source-state"], &stored["destination-state"]),
        (&json!("unknown"), &json!("stored"))
    );
    let texts = towline.events.iter().filter_map(|event| event["text"].as_str());
    assert!(
        texts.clone().any(|text| text == "reading from exec:cat stream.bin"),
        "{:?}",
        texts.collect::<Vec<_>>()
    );
    towline.write_saved("stream.bin", "saved.bin");
    let stream = towline.run(&["inspect", "saved.bin"], 0);
    assert_eq!(stream["kind"], "stream");
    towline.write("source.facts", "{}");
    for (name, version) in [("here", "v1"), ("there", "v1")] {
        towline.write(name, version);
    }
    let checked = towline.run(&["check", "attr:here", "attr:there"], 0);
    assert_eq!(checked["verdict"], "yes", "{checked}");
    towline.run(&["check", "--facts-out", "here.facts", "attr:here"], 0);
    towline.run(&["moves"], 0);
    assert_eq!(towline.run(&["run", "none.img"], 1)["reason"], "image");
    assert_eq!(towline.run(&["run", "null:"], 2)["reason"], "usage");
    assert_eq!(towline.run(&["ps"], 0)["guests"], 0);
    assert_eq!(towline.run(&["status", "none"], 8)["state"], "none");
    assert_eq!(towline.run(&["resume", "zzzz"], 2)["reason"], "unknown-id");
    towline.write(".guest.img.partial", "p");
    let repaired = towline.run(&["repair", "."], 0);
    assert_eq!(repaired["partials"][0]["state"], "leftover", "{repaired}");
}

/// Commands that fail before they have a result.
fn early_failures(towline: &mut Events) {
    for (words, status, reason) in [
        (&["inspect", "none.img"][..], 1, "other"),
        (&["inspect", "mem:8M"], 2, "usage"),
        (&["inspect", "--verify", "unix:none"], 2, "usage"),
        (&["inspect", "exec:false"], 1, "migration"),
        (&["repair", "null:"], 2, "usage"),
        (&["store", "ls", "store:none/none/x"], 1, "image"),
        (&["net", "--tap", "none"], 2, "usage"),
        (&["net", "--tap-fds", "999", "--socket", "n.sock"], 1, "other"),
        (&["copy", "--nonsense", "a.img", "b.img"], 2, "usage"),
        (&["copy", "--log", "nonsense", "a.img", "b.img"], 2, "usage"),
    ] {
        let last = towline.run(words, status);
        assert_eq!(
            (&last["event"], &last["reason"]),
            (&json!("failed"), &json!(reason)),
            "{words:?}: {last}"
        );
    }
}
