//! Helpers of these tests: the rows of the matrix, stock QEMU's part of a migration, and the comparison.

use std::path::Path;
use std::time::Duration;

use serde_json::{Value, json};
pub(crate) use towline_lab::expect::{Scratch, qmp};
use towline_lab::{BootSector, Builder, Finished, Qemu, Towline, Version, towline, wait_until};

pub(crate) const WITHIN: Duration = Duration::from_secs(120);
const MEMORY_MIB: u64 = 64;
/// A rate that no host reaches: QEMU's own default would slow every test down.
const BANDWIDTH_UNLIMITED: u64 = 1 << 40;

/// A QEMU, with its own machine type.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Row {
    Qemu10_0,
    Qemu7_2,
}

impl Row {
    /// Starts this row's guest on its QEMU and waits until it counts.
    pub(crate) fn boot(self) -> Qemu {
        self.boot_on(self.version())
    }

    /// Starts this row's guest on another QEMU and waits until it counts. Where that QEMU loses the writes of
    /// an emulated guest it is stopped then, see [`Version::tracks_emulated_writes`].
    pub(crate) fn boot_on(self, version: Version) -> Qemu {
        let qemu = boot(self.builder_on(version));
        if !version.tracks_emulated_writes() {
            stop(&qemu);
        }
        qemu
    }

    fn version(self) -> Version {
        match self {
            Self::Qemu10_0 => Version::V10_0,
            Self::Qemu7_2 => Version::V7_2,
        }
    }

    /// Builder of this row's guest on this row's QEMU.
    pub(crate) fn builder(self) -> Builder {
        self.builder_on(self.version())
    }

    /// Builder of this row's guest on QEMU 10.0, which stores and loads images without towline.
    pub(crate) fn builder_on_10_0(self) -> Builder {
        self.builder_on(Version::V10_0)
    }

    /// Builder of this row's guest on another QEMU.
    pub(crate) fn builder_on(self, version: Version) -> Builder {
        let builder = Qemu::builder(version).machine(self.version().machine());
        // `-cpu max` is not the same in two versions.
        builder.cpu("Nehalem").memory_mib(MEMORY_MIB).boot_sector(BootSector::default())
    }
}

pub(crate) fn text(path: &Path) -> String {
    path.to_str().unwrap().to_owned()
}

/// Starts the small guest and waits until it counts.
pub(crate) fn boot(builder: Builder) -> Qemu {
    let qemu = builder.start().unwrap();
    qemu.wait_counting(WITHIN).unwrap();
    qemu
}

pub(crate) fn stop(qemu: &Qemu) {
    qemu.qmp().execute("stop", Value::Null).unwrap();
}

/// Starts a destination that waits.
pub(crate) fn waiting(builder: Builder) -> Qemu {
    builder.incoming_defer().start().unwrap()
}

/// Runs `towline copy`, which must succeed.
pub(crate) fn copy(arguments: &[&str]) -> Finished {
    start_copy(arguments).wait_done(WITHIN).unwrap()
}

/// Runs `towline copy` with this number of lanes, which must succeed.
pub(crate) fn copy_with(lanes: usize, arguments: &[&str]) -> Finished {
    let lanes = lanes.to_string();
    copy(&[&["--multifd-channels", &lanes], arguments].concat())
}

/// Runs `towline copy --json`, which must succeed; returns its last event.
pub(crate) fn completed(arguments: &[&str]) -> Value {
    let finished = copy(&[&["--json"], arguments].concat());
    let last = events(&finished.stdout).pop().unwrap();
    assert_eq!(last["event"], "completed", "{last}");
    last
}

/// Runs `towline copy`, which must exit with `code`; returns its standard error.
pub(crate) fn refused(code: i32, arguments: &[&str]) -> String {
    let finished = start_copy(arguments).wait(WITHIN).unwrap();
    assert_eq!(finished.status.code(), Some(code), "{}{}", finished.stdout, finished.stderr);
    finished.stderr
}

pub(crate) fn start_copy(arguments: &[&str]) -> Towline {
    towline([&["copy"], arguments].concat()).unwrap()
}

/// Events of `--json`.
pub(crate) fn events(stdout: &str) -> Vec<Value> {
    stdout.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Waits until a towline with `--json` listens; returns the address.
pub(crate) fn listening_on(towline: &mut Towline) -> String {
    wait_until("towline that listens", WITHIN, || {
        let stdout = towline.stdout();
        // The last line may be incomplete.
        let whole = stdout.rfind('\n').map_or("", |end| &stdout[..end]);
        let address = events(whole)
            .iter()
            .find_map(|event| Some(event["text"].as_str()?.strip_prefix("listening on ")?.to_owned()));
        assert!(address.is_some() || towline.runs()?, "it ended: {stdout}{}", towline.stderr());
        Ok(address)
    })
    .unwrap()
}

/// Sets the capabilities and parameters for this number of lanes, as a user would.
pub(crate) fn set_lanes(qemu: &Qemu, lanes: usize) {
    set_capability(qemu, "multifd", lanes > 0);
    if lanes > 0 {
        qemu.qmp().execute("migrate-set-parameters", json!({ "multifd-channels": lanes })).unwrap();
    }
}

pub(crate) fn set_capability(qemu: &Qemu, name: &str, on: bool) {
    let arguments = json!({ "capabilities": [{ "capability": name, "state": on }] });
    qemu.qmp().execute("migrate-set-capabilities", arguments).unwrap();
}

/// Starts stock QEMU's `migrate` with a return path.
pub(crate) fn migrate(source: &Qemu, uri: &str, lanes: usize) {
    set_lanes(source, lanes);
    set_capability(source, "return-path", true);
    migrate_as_set(source, uri);
}

/// Starts stock QEMU's `migrate` with its current capabilities.
pub(crate) fn migrate_as_set(source: &Qemu, uri: &str) {
    let unlimited = json!({ "max-bandwidth": BANDWIDTH_UNLIMITED });
    source.qmp().execute("migrate-set-parameters", unlimited).unwrap();
    source.qmp().execute("migrate", json!({ "uri": uri })).unwrap();
}

/// Waits until stock QEMU's migration has completed and its guest is paused for good.
pub(crate) fn wait_migrated(source: &Qemu) -> Value {
    let migration = source.qmp().wait_migration("completed", WITHIN).unwrap();
    source.qmp().wait_status("postmigrate", WITHIN).unwrap();
    migration
}

/// Runs stock QEMU's `migrate-incoming` on a free port; returns the address.
pub(crate) fn listen(destination: &Qemu, lanes: usize) -> String {
    set_lanes(destination, lanes);
    destination.qmp().execute("migrate-incoming", json!({ "uri": "tcp:127.0.0.1:0" })).unwrap();
    let migration = destination.qmp().execute("query-migrate", Value::Null).unwrap();
    let port = migration["socket-address"][0]["port"].as_str();
    format!("tcp:127.0.0.1:{}", port.unwrap_or_else(|| panic!("no port in {migration}")))
}

/// Has stock QEMU 10.0 store its guest in a mapped-ram file.
pub(crate) fn store_by_qemu(source: &Qemu, image: &Path, lanes: usize) {
    set_lanes(source, lanes);
    set_capability(source, "mapped-ram", true);
    migrate_as_set(source, &format!("file:{}", image.display()));
    wait_migrated(source);
}

/// Has stock QEMU 10.0, a clone of `builder`, load an image without towline and stay paused.
pub(crate) fn load_by_qemu(builder: Builder, image: &Path, lanes: usize) -> Qemu {
    let destination = waiting(builder.paused());
    set_lanes(&destination, lanes);
    set_capability(&destination, "mapped-ram", true);
    let uri = format!("file:{}", image.display());
    destination.qmp().execute("migrate-incoming", json!({ "uri": uri })).unwrap();
    destination.qmp().wait_migration("completed", WITHIN).unwrap();
    destination
}

/// Asserts that two stopped guests are equal in every byte, and that the destination's runs on from there.
pub(crate) fn prove_equal(source: &Qemu, destination: &Qemu) {
    let counter = source.counter().unwrap();
    assert_eq!(destination.memory_hash().unwrap(), source.memory_hash().unwrap());
    assert!(destination.counter().unwrap() >= counter);
    assert_eq!(destination.check_filled().unwrap(), source.check_filled().unwrap());
    destination.qmp().execute("cont", Value::Null).unwrap();
    assert!(destination.wait_counting(WITHIN).unwrap() > counter);
}
