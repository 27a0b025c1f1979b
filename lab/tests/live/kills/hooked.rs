//! A towline that waits at a given moment: this test's own binary, started again, runs `plan::copy` with an observer that
//! says which phase begins, and waits there if it is the one that was ordered. So towline itself has no hook.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use towline_channel::Cancel;
use towline_control::plan::{
    Destination, Error, GuestState, Observer, Phase, Request, Source, SourceCategory, Task, TransferOptions,
    copy,
};
use towline_lab::{Qemu, Towline};

/// Where the orders are found.
const ORDERS: &str = "TOWLINE_LAB_ORDERS";
/// Longer than any test: whoever waits for longer has been forgotten.
const HOLD_WITHIN: Duration = Duration::from_secs(60);
/// Slow enough that there is a time in which the guest moves.
const BANDWIDTH: u64 = 12 << 20;

/// Enough for all that a guest here can write: the last of it goes at full speed, over lanes that cannot keep up.
const DOWNTIME_LIMIT: Duration = Duration::from_secs(2);

/// What to do.
pub(super) struct Orders {
    pub(super) lanes: usize,
    /// A move, not a copy.
    pub(super) end_source: bool,
    /// Where to wait, if anywhere, until the file `go` is there.
    pub(super) hold: Option<Phase>,
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
            "kills::hooked::towline_under_orders".into(),
            "--nocapture".into(),
        ];
        Towline::start(Path::new("/usr/bin/env"), arguments).unwrap()
    }
}

/// No test by itself: what [`Orders::start`] runs, in a process of its own.
#[test]
fn towline_under_orders() {
    let Ok(orders) = std::env::var(ORDERS) else { return };
    let orders: Value = serde_json::from_str(&orders).unwrap();
    let path = |name: &str| PathBuf::from(orders[name].as_str().unwrap());
    let lanes = orders["lanes"].as_u64().map(|lanes| lanes as usize);
    let transfer =
        TransferOptions { multifd_channels: lanes, max_bandwidth: Some(BANDWIDTH), throttle: false };
    let task = match orders["end-source"] == true {
        true => Task::Move { transfer, run: None, detach_vsock: false, devices: Vec::new() },
        false => Task::Copy { transfer, run: None, resume: false, base: None },
    };
    let request = Request { downtime_limit: DOWNTIME_LIMIT, ..Request::new(task) };
    let observer = Hook { hold: orders["hold"].as_str().map(str::to_owned), go: path("go") };
    let (source, destination) = (Source::Qmp(path("source")), Destination::Qmp(path("destination")));
    let result = copy(&source, &destination, &request, &Cancel::new().unwrap(), &observer);
    // As the command line does.
    std::process::exit(match result {
        Ok(_) => 0,
        Err(failure) => {
            eprintln!("error: {}", failure.error);
            let (code, guest) = match (&*failure.error, &failure.guest) {
                (Error::Usage(_), _) => (2, "untouched".into()),
                (_, GuestState::Safe) => (1, "safe".into()),
                (_, GuestState::Unreached) => (1, "unreached".into()),
                (_, guest @ GuestState::NeedsAttention(_)) => (3, guest.text(SourceCategory::Qemu)),
            };
            eprintln!("guest: {guest}");
            failure.notes.iter().for_each(|note| eprintln!("note: {note}"));
            code
        }
    });
}

/// Says each phase, and waits at one.
struct Hook {
    hold: Option<String>,
    go: PathBuf,
}

impl Observer for Hook {
    fn phase(&self, phase: Phase) {
        let name = format!("{phase:?}");
        println!("phase {name}.");
        let begun = Instant::now();
        while self.hold.as_deref() == Some(&name) && !self.go.exists() {
            assert!(begun.elapsed() < HOLD_WITHIN, "nobody says go");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}
