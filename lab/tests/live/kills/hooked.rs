//! A towline that waits at a given phase: this test's own binary, started again, runs `plan::copy` with an
//! observer that reports each phase and waits at the requested one. So towline itself needs no hook.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use towline_channel::Cancel;
use towline_control::plan::{
    AfterCopy, CopyPhase, CopyRequest, Destination, Error, GuestAfterFailure, Observer, Source,
    SourceCategory, Task, Throttling, TransferOptions, copy,
};
use towline_lab::{Qemu, Towline};

/// Environment variable with the orders.
const ORDERS: &str = "TOWLINE_LAB_ORDERS";
/// Longer than any test: a process that waits for longer is abandoned.
const HOLD_WITHIN: Duration = Duration::from_secs(60);
/// Slow enough that the copy takes a while.
const BANDWIDTH: u64 = 12 << 20;

/// More memory than a guest here can write: the rest goes at full speed, over lanes that cannot keep up.
const DOWNTIME_LIMIT: Duration = Duration::from_secs(2);

/// Instructions for the hooked towline.
pub(super) struct Orders {
    pub(super) lanes: usize,
    /// True for a move, false for a copy.
    pub(super) end_source: bool,
    /// Phase to wait at, if any, until the file `go` exists.
    pub(super) hold: Option<CopyPhase>,
    pub(super) go: PathBuf,
}

impl Orders {
    /// Starts the copy between these two.
    pub(super) fn start(&self, source: &Qemu, destination: &Qemu) -> Towline {
        let orders = json!({
            "source": source.qmp_path(),
            "destination": destination.qmp_path(),
            "lanes": self.lanes,
            "end-source": self.end_source,
            "hold": self.hold.map(|phase| format!("{phase:?}")),
            "go": self.go,
        });
        let binary = std::env::current_exe().unwrap();
        let arguments = [
            format!("{ORDERS}={orders}"),
            binary.display().to_string(),
            "--exact".into(),
            "kills::hooked::hooked_towline".into(),
            "--nocapture".into(),
        ];
        Towline::start(Path::new("/usr/bin/env"), arguments).unwrap()
    }
}

/// Not a test by itself: the process that [`Orders::start`] starts.
#[test]
fn hooked_towline() {
    let Ok(orders) = std::env::var(ORDERS) else { return };
    let orders: Value = serde_json::from_str(&orders).unwrap();
    let path = |name: &str| PathBuf::from(orders[name].as_str().unwrap());
    let lanes = orders["lanes"].as_u64().map(|lanes| lanes as usize);
    let transfer = TransferOptions {
        multifd_channels: lanes,
        max_bandwidth: Some(BANDWIDTH),
        throttling: Throttling::Unchanged,
    };
    let task = if orders["end-source"] == true {
        Task::Move { transfer, run: None, detach_vsock: false, devices: Vec::new() }
    } else {
        Task::Copy { transfer, after: AfterCopy::default(), base: None }
    };
    let request = CopyRequest { downtime_limit: DOWNTIME_LIMIT, ..CopyRequest::new(task) };
    let observer = Hook { hold: orders["hold"].as_str().map(str::to_owned), go: path("go") };
    let (source, destination) = (Source::Qmp(path("source")), Destination::Qmp(path("destination")));
    let result = copy(&source, &destination, &request, &Cancel::new().unwrap(), &observer);
    // As the command line does.
    std::process::exit(match result {
        Ok(_) => 0,
        Err(failure) => {
            eprintln!("error: {}", failure.error);
            let (code, guest) = match (&*failure.error, &failure.guest) {
                (Error::Invalid(_), _) => (2, "untouched".into()),
                (_, guest) if guest.needs_attention() => (3, guest.sentence(SourceCategory::Qemu)),
                (_, guest) if *guest == GuestAfterFailure::SAFE => (1, "safe".into()),
                _ => (1, "unreached".into()),
            };
            eprintln!("guest: {guest}");
            failure.notes.iter().for_each(|note| eprintln!("note: {note}"));
            code
        }
    });
}

/// Reports each phase, and waits at one.
struct Hook {
    hold: Option<String>,
    go: PathBuf,
}

impl Observer for Hook {
    fn phase(&self, phase: CopyPhase) {
        let name = format!("{phase:?}");
        println!("phase {name}.");
        let begun = Instant::now();
        while self.hold.as_deref() == Some(&name) && !self.go.exists() {
            assert!(begun.elapsed() < HOLD_WITHIN, "the file `go` is missing");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}
