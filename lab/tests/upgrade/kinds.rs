//! The table of `docs/upgrade.md`, "What an upgrade carries, and what it refuses": drives, confinement, and
//! what was plugged in. Guests without software, each with many kinds, so one upgrade tries them all. Options
//! that are refused by themselves (`snapshot=on`, relative names of a daemon, `rr=`) are in the tests of the
//! command line.

use std::fs::{self, File};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};
use tempfile::TempDir;
use towline_lab::expect::completed;
use towline_lab::{
    BootSector, Builder, Finished, MemoryBackend, Qemu, Qmp, Towline, Version, require_lab, running_qemus,
    towline_binary, wait_until,
};

use crate::support::{WITHIN, directory, kill};

/// A guest, and the directory of everything.
struct Guest {
    place: TempDir,
    qemu: Qemu,
}

impl Guest {
    /// One whose QEMU is started by the command `prefix`.
    fn start(prefix: &[&str], options: impl FnOnce(&Path) -> Vec<String>) -> Self {
        Self::of(Qemu::builder(Version::V10_0).memory_mib(32), prefix, options)
    }

    fn of(builder: Builder, prefix: &[&str], options: impl FnOnce(&Path) -> Vec<String>) -> Self {
        let place = directory();
        let options = options(place.path());
        let qemu = builder
            .memory_backend(MemoryBackend::Memfd { prealloc: false })
            .prefixed(prefix.iter().copied())
            .args(options)
            .start()
            .unwrap();
        Self { place, qemu }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.place.path().join(name)
    }

    fn begin(&self, options: &[&str]) -> Towline {
        let mut words = vec![format!("XDG_RUNTIME_DIR={}", self.place.path().display())];
        words.push(towline_binary().unwrap().display().to_string());
        words.extend(["upgrade", "--json"].map(str::to_owned));
        words.extend(options.iter().map(|option| (*option).to_owned()));
        words.push(format!("qmp:{}", self.qemu.qmp_path().display()));
        Towline::start("/usr/bin/env".as_ref(), words).unwrap()
    }

    /// An upgrade that is refused with all of these in its text; the guest runs on.
    fn refused(&self, options: &[&str], expected: &[&str]) -> Finished {
        let finished = self.begin(options).wait(WITHIN).unwrap();
        assert_eq!(finished.status.code(), Some(1), "{}{}", finished.stdout, finished.stderr);
        for text in expected {
            assert!(finished.stderr.contains(text), "{text:?} is not in {}", finished.stderr);
        }
        assert_eq!(self.qemu.qmp().status().unwrap(), "running");
        assert_eq!(self.new_qemu(), None);
        finished
    }

    /// An upgrade that is done. Returns the new QEMU's process.
    fn upgraded(&self, options: &[&str]) -> u32 {
        completed(&self.begin(options).wait(WITHIN).unwrap());
        self.new_qemu().unwrap()
    }

    fn new_qemu(&self) -> Option<u32> {
        running_qemus(self.place.path()).into_values().next()
    }

    fn qmp(&self, command: &str, arguments: Value) -> Value {
        self.qemu.qmp().execute(command, arguments).unwrap()
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        self.new_qemu().into_iter().for_each(kill);
    }
}

fn image(path: &Path) -> String {
    File::create(path).unwrap().set_len(1 << 20).unwrap();
    path.display().to_string()
}

fn qemu_img(words: &[&str]) {
    assert!(Command::new("qemu-img").args(words).status().unwrap().success(), "{words:?}");
}

/// `-drive` of a virtio disk.
fn drive(id: &str, properties: &str) -> Vec<String> {
    let drive = format!("if=none,id={id},{properties}");
    ["-drive".into(), drive, "-device".into(), format!("virtio-blk-pci,drive={id},id=dev-{id}")].into()
}

#[test]
fn drives_that_the_new_qemu_opens_alike_are_carried() {
    if !require_lab("drives_that_the_new_qemu_opens_alike_are_carried") {
        return;
    }
    let place = directory();
    let here = place.path().display().to_string();
    let prefix = ["env", "-C", here.as_str()];
    let guest = Guest::start(&prefix, |_| {
        let path = |name: &str| place.path().join(name).display().to_string();
        for name in ["raw", "ro", "node", "limited", "relative", "hard", "part"] {
            image(&place.path().join(name));
        }
        fs::hard_link(path("hard"), path("other")).unwrap();
        qemu_img(&["create", "-q", "-f", "qcow2", &path("base"), "1M"]);
        qemu_img(&["create", "-q", "-f", "qcow2", "-b", &path("base"), "-F", "qcow2", &path("top")]);
        qemu_img(&["bitmap", "--add", &path("top"), "stored"]);
        let mut options = Vec::new();
        options.extend(drive("raw", &format!("file={},format=raw", path("raw"))));
        options.extend(drive("top", &format!("file={},format=qcow2", path("top"))));
        options.extend(drive("ro", &format!("file={},format=raw,readonly=on", path("ro"))));
        options.extend(drive("relative", "file=relative,format=raw"));
        options.extend(drive("hard", &format!("file={},format=raw", path("hard"))));
        options.extend(drive(
            "limited",
            &format!("file={},format=raw,throttling.iops-total=500", path("limited")),
        ));
        let part =
            format!("driver=raw,offset=65536,size=65536,file.driver=file,file.filename={}", path("part"));
        options.extend(drive("part", &part));
        options.extend(["-blockdev".into(), format!("driver=file,node-name=f0,filename={}", path("node"))]);
        options.extend(["-device".into(), "virtio-blk-pci,drive=f0,id=dev-node".into()]);
        options
    });
    let other = format!("drive.hard.file={}", place.path().join("other").display());
    guest.upgraded(&["--set", &other]);
    let path = guest.qemu.directory().join("lab.qmp");
    let monitor = wait_until("the guest's monitor", WITHIN, || Ok(Qmp::connect(&path, WITHIN).ok())).unwrap();
    let block = monitor.execute("query-block", json!(null)).unwrap();
    let of = |id: &str| {
        block.as_array().unwrap().iter().find(|entry| entry["device"] == id).unwrap()["inserted"].clone()
    };
    assert_eq!(of("limited")["iops"], 500);
    let nodes = monitor.execute("query-named-block-nodes", json!({ "flat": true })).unwrap();
    assert!(nodes.to_string().contains(r#""name":"stored""#), "{nodes}");
    assert!(of("hard")["file"].as_str().unwrap().ends_with("other"), "{block}");
}

#[test]
fn drives_that_the_new_qemu_would_not_have_are_refused_by_name() {
    if !require_lab("drives_that_the_new_qemu_would_not_have_are_refused_by_name") {
        return;
    }
    let guest = Guest::start(&[], |place| {
        let path = |name: &str| place.join(name).display().to_string();
        let mut options = Vec::new();
        for name in ["replaced", "limited", "mirrored", "marked"] {
            options.extend(drive(name, &format!("file={},format=raw", image(&place.join(name)))));
        }
        qemu_img(&["create", "-q", "-f", "qcow2", &path("base"), "1M"]);
        qemu_img(&["create", "-q", "-f", "qcow2", "-b", &path("base"), "-F", "qcow2", &path("top")]);
        options.extend(drive("top", &format!("file={},format=qcow2", path("top"))));
        options.extend(["-device".into(), "ahci,id=ahci".into()]);
        let cd = format!("if=none,id=cd,media=cdrom,format=raw,file={}", image(&place.join("medium")));
        options.extend([
            "-drive".into(),
            cd,
            "-device".into(),
            "ide-cd,drive=cd,bus=ahci.0,id=dev-cd".into(),
        ]);
        options
    });
    let path = |name: &str| guest.path(name).display().to_string();
    image(&guest.path("new"));
    fs::rename(guest.path("new"), guest.path("replaced")).unwrap();
    qemu_img(&["create", "-q", "-f", "qcow2", &path("new"), "1M"]);
    fs::rename(guest.path("new"), guest.path("base")).unwrap();
    guest.qmp("eject", json!({ "id": "dev-cd", "force": true }));
    let mut limits = json!({ "device": "limited" });
    for key in ["bps", "bps_rd", "bps_wr", "iops_rd", "iops_wr"] {
        limits[key] = json!(0);
    }
    limits["iops"] = json!(700);
    guest.qmp("block_set_io_throttle", limits);
    let node =
        |name: &str| json!({ "driver": "file", "node-name": name, "filename": image(&guest.path(name)) });
    guest.qmp("blockdev-add", node("plugged"));
    guest.qmp("blockdev-add", node("target"));
    let mirror = json!({ "job-id": "m0", "device": "mirrored", "target": "target", "sync": "full" });
    guest.qmp("blockdev-mirror", mirror);
    guest.qmp("block-dirty-bitmap-add", json!({ "node": "marked", "name": "b0" }));
    let address = json!({ "type": "unix", "data": { "path": path("nbd") } });
    guest.qmp("nbd-server-start", json!({ "addr": address }));
    guest.qmp("block-export-add", json!({ "type": "nbd", "id": "e0", "node-name": "plugged" }));
    let block = "drive \"/machine/peripheral/dev-";
    let expected = [
        format!("{block}replaced\": {}, file ", path("replaced")),
        format!("{block}top\": {}, file ", path("top")),
        "drive \"dev-cd\": none in the old QEMU".into(),
        "limits of drive \"/machine/peripheral/dev-limited\": iops=700 in the old QEMU, none".into(),
        "block node \"plugged\"".into(),
        "job \"m0\": mirror, ".into(),
        "/b0\": one that is not stored".into(),
        "export \"e0\": nbd of plugged".into(),
    ];
    let expected: Vec<&str> = expected.iter().map(String::as_str).collect();
    guest.refused(&[], &expected);
    guest.refused(&["--copy"], &expected);
}

/// The new QEMU opens the file that the drive has now, not the one that it was started with.
#[test]
fn a_snapshot_that_was_taken_before_is_carried() {
    if !require_lab("a_snapshot_that_was_taken_before_is_carried") {
        return;
    }
    let guest =
        Guest::start(&[], |place| drive("d0", &format!("file={},format=raw", image(&place.join("disk")))));
    let overlay = guest.path("overlay").display().to_string();
    let snapshot = json!({ "device": "d0", "snapshot-file": overlay, "format": "qcow2" });
    guest.qmp("blockdev-snapshot-sync", snapshot);
    guest.upgraded(&[]);
}

#[test]
fn files_that_are_gone_are_named() {
    if !require_lab("files_that_are_gone_are_named") {
        return;
    }
    for act in
        [|path: &Path| fs::remove_file(path), |path: &Path| fs::rename(path, path.with_extension("moved"))]
    {
        let guest = Guest::start(&[], |place| {
            drive("d0", &format!("file={},format=raw", image(&place.join("disk"))))
        });
        act(&guest.path("disk")).unwrap();
        let path = guest.path("disk").display().to_string();
        guest.refused(&[], &[&path, "No such file"]);
        // Another file of that name is another file.
        image(&guest.path("disk"));
        guest.refused(&[], &["drive \"/machine/peripheral/dev-d0\": ", &path]);
    }
}

#[test]
fn a_snapshot_that_is_taken_during_the_copy_keeps_the_guest_where_it_is() {
    if !require_lab("a_snapshot_that_is_taken_during_the_copy_keeps_the_guest_where_it_is") {
        return;
    }
    let boot_sector = BootSector { fill_mib: 160, words_per_page: 512, ..BootSector::default() };
    let builder = Qemu::builder(Version::V10_0).memory_mib(192).boot_sector(boot_sector);
    let guest = Guest::of(builder, &[], |place| {
        drive("d0", &format!("file={},format=raw", image(&place.join("disk"))))
    });
    guest.qemu.wait_counting(WITHIN).unwrap();
    let upgrade = guest.begin(&["--copy"]);
    let rate = |bytes: u64| guest.qmp("migrate-set-parameters", json!({ "max-bandwidth": bytes }));
    wait_until("a migration that runs", WITHIN, || {
        let found = guest.qmp("query-migrate", json!(null));
        Ok((found["status"] == "active").then_some(()))
    })
    .unwrap();
    rate(1 << 20);
    let overlay = guest.path("overlay").display().to_string();
    let snapshot = json!({ "device": "d0", "snapshot-file": overlay, "format": "qcow2" });
    guest.qmp("blockdev-snapshot-sync", snapshot);
    rate(1 << 40);
    let finished = upgrade.wait(WITHIN).unwrap();
    assert_eq!(finished.status.code(), Some(1), "{}{}", finished.stdout, finished.stderr);
    assert!(finished.stderr.contains("the guest's drives have changed"), "{}", finished.stderr);
    assert!(finished.stderr.contains(&overlay), "{}", finished.stderr);
    assert_eq!(guest.qemu.qmp().status().unwrap(), "running");
    assert_eq!(guest.new_qemu(), None);
    let counter = guest.qemu.counter().unwrap();
    wait_until("a guest that counts", WITHIN, || Ok((guest.qemu.counter()? > counter).then_some(())))
        .unwrap();
}

#[test]
fn what_was_plugged_in_or_unplugged_is_refused_by_name() {
    if !require_lab("what_was_plugged_in_or_unplugged_is_refused_by_name") {
        return;
    }
    let options =
        ["-device", "qemu-xhci,id=usb", "-device", "usb-tablet,id=t0", "-object", "iothread,id=it0"];
    let guest = Guest::start(&[], |_| options.map(str::to_owned).into());
    guest.qmp("device_del", json!({ "id": "t0" }));
    guest.qmp("object-add", json!({ "qom-type": "iothread", "id": "it1" }));
    guest.qmp("chardev-add", json!({ "id": "c1", "backend": { "type": "null", "data": {} } }));
    let polled = |time: u64| json!({ "path": "/objects/it0", "property": "poll-max-ns", "value": time });
    guest.qmp("qom-set", polled(7));
    let expected = [
        "device \"t0\": none in the old QEMU, usb-tablet in the new one",
        "object \"it1\": iothread in the old QEMU, none",
        "iothread \"it0\": poll-max-ns=7 in the old QEMU",
        "character device \"c1\"",
    ];
    guest.refused(&[], &expected);
    guest.refused(&["--copy"], &expected);
    guest.qmp("object-del", json!({ "id": "it1" }));
    guest.qmp("chardev-remove", json!({ "id": "c1" }));
    guest.qmp("qom-set", polled(32768));
    guest.refused(&[], &expected[..1]);
    // What a new QEMU lacks does not fit by the rules of `check`.
    guest.qmp("device_add", json!({ "driver": "usb-mouse", "id": "m0" }));
    guest.refused(&["--set", "device.t0="], &["usb-mouse"]);
    guest.qmp("device_del", json!({ "id": "m0" }));
    guest.upgraded(&["--set", "device.t0="]);
}

/// Lines of `/proc/PID/status` and others that the new QEMU has to have as the old one.
fn confinement(pid: u32) -> Vec<String> {
    let read = |name: &str| fs::read_to_string(format!("/proc/{pid}/{name}")).unwrap();
    let names = ["Uid", "Gid", "Groups", "Cap", "NoNewPrivs", "Seccomp", "Umask", "Cpus_allowed_list"];
    let status = read("status");
    let mut found: Vec<String> = status
        .lines()
        .filter(|line| names.iter().any(|name| line.starts_with(name)))
        .map(str::to_owned)
        .collect();
    let limits = read("limits");
    // QEMU raises the soft limit of open files.
    found.extend(limits.lines().filter(|line| !line.starts_with("Max open files")).map(str::to_owned));
    let stat = read("stat");
    found.push(stat.rsplit_once(") ").unwrap().1.split(' ').nth(16).unwrap().to_owned());
    found.extend([read("cgroup"), read("oom_score_adj")]);
    found
}

/// A control group for a test, removed when its processes have ended.
struct ControlGroup(PathBuf);

impl ControlGroup {
    fn with(pid: u32) -> Option<Self> {
        let path = PathBuf::from(format!("/sys/fs/cgroup/cpu/towline-lab-{pid}"));
        fs::create_dir(&path).ok()?;
        let group = Self(path);
        fs::write(group.0.join("cgroup.procs"), pid.to_string()).ok()?;
        Some(group)
    }
}

impl Drop for ControlGroup {
    fn drop(&mut self) {
        let removed = wait_until("an empty control group", WITHIN, || Ok(fs::remove_dir(&self.0).ok()));
        if !std::thread::panicking() {
            removed.unwrap();
        }
    }
}

#[test]
fn the_new_qemu_is_confined_as_the_old_one() {
    if !require_lab("the_new_qemu_is_confined_as_the_old_one") {
        return;
    }
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIPPED the_new_qemu_is_confined_as_the_old_one: only root may confine");
        return;
    }
    let script = "umask 027; echo 300 > /proc/self/oom_score_adj; exec \"$@\"";
    let prefix = [
        "prlimit",
        "--nofile=1000:2000",
        "--core=0",
        "--memlock=65536",
        "nice",
        "-n",
        "5",
        "taskset",
        "-c",
        "0",
        "sh",
        "-c",
        script,
        "sh",
        "setpriv",
        "--regid",
        "65534",
        "--groups",
        "65533,65532",
        "--bounding-set",
        "-all",
        "--inh-caps",
        "-all",
        "--no-new-privs",
        "--",
    ];
    let group;
    let guest = Guest::start(&prefix, |_| Vec::new());
    group = ControlGroup::with(guest.qemu.pid());
    let before = confinement(guest.qemu.pid());
    assert!(before.iter().any(|line| line == "CapEff:\t0000000000000000"), "{before:?}");
    let new = guest.upgraded(&[]);
    assert_eq!(confinement(new), before);
    if group.is_some() {
        let own = fs::read_to_string(format!("/proc/{new}/cgroup")).unwrap();
        assert!(own.contains(":cpu:/towline-lab-"), "{own}");
    }
    kill(new);
    drop(group);
}

#[test]
fn confinement_that_cannot_be_given_is_refused_by_name() {
    if !require_lab("confinement_that_cannot_be_given_is_refused_by_name") {
        return;
    }
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIPPED confinement_that_cannot_be_given_is_refused_by_name: only root may confine");
        return;
    }
    let prefix =
        ["unshare", "--uts", "--ipc", "chrt", "--batch", "0", "setpriv", "--securebits", "+noroot", "--"];
    let guest = Guest::start(&prefix, |_| ["-sandbox", "on"].map(str::to_owned).into());
    let thread = guest.qmp("query-cpus-fast", json!(null))[0]["thread-id"].to_string();
    assert!(Command::new("taskset").args(["-cp", "0", &thread]).output().unwrap().status.success());
    let expected = [
        "CapEff: \"0000000000000000\" in the old QEMU",
        "Seccomp: \"2\" in the old QEMU, \"0\" in the new one",
        "ipc namespace: ",
        "uts namespace: ",
        "scheduling policy: \"3 priority 0\" in the old QEMU",
        "threads with other processors: ",
    ];
    guest.refused(&["--set", "sandbox="], &expected);
    guest.refused(&["--set", "sandbox=", "--copy"], &expected);
}

#[test]
fn the_qemu_of_another_user_is_refused() {
    if !require_lab("the_qemu_of_another_user_is_refused") {
        return;
    }
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIPPED the_qemu_of_another_user_is_refused: only root may be another user");
        return;
    }
    let shared = directory();
    for path in [shared.path().to_owned(), shared.path().join("qemu")] {
        fs::create_dir_all(&path).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o777)).unwrap();
    }
    let builder = Qemu::builder(Version::V10_0).memory_mib(32).directory(shared.path().join("qemu"));
    let guest = Guest::of(builder, &["setpriv", "--euid", "65534", "--"], |_| Vec::new());
    guest.refused(&[], &["belongs to user 65534, towline runs as user 0"]);
}
