//! Helpers of these tests: an image of a Linux guest, and the guests that run from it.

use std::fs::{self, File};
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;
use std::process::Command;
use std::sync::OnceLock;
use std::time::Duration;

use rustix::process::Signal;
use serde_json::Value;
use tempfile::TempDir;
use towline_lab::expect::qmp;
use towline_lab::{
    Kernel, LinuxGuest, Qemu, Qmp, Towline, Version, kill, running_qemus, signal, towline, towline_binary,
    wait_until,
};

/// Generous: two busy processors.
pub(crate) const WITHIN: Duration = Duration::from_secs(120);
pub(crate) const MIB: u64 = 1 << 20;
pub(crate) const MEMORY_MIB: u64 = 512;
/// Length of a guest's disk.
pub(crate) const DISK: u64 = 64 * MIB;
/// The part of it that the guest fills and hashes.
const FILLED: u64 = 96 * MIB;

/// An image of a guest that ran, and the directories of the guests that run from it.
pub(crate) struct Saved {
    place: TempDir,
    version: Version,
    kernel: Vec<String>,
    hash: String,
    /// The guest's counter in the image.
    tick: u64,
    /// Guest-physical address of the counter, below the hole of PCI.
    counter: u64,
}

impl Drop for Saved {
    fn drop(&mut self) {
        // Detached guests must not outlive a test that fails.
        running_qemus(self.place.path()).into_values().for_each(kill);
    }
}

/// A saved guest whose files have no names any more, so that they end with this process.
struct Template {
    saved: Saved,
    image: File,
    manifest: File,
}

impl Template {
    fn of(saved: Saved) -> Self {
        let [image, manifest] = [saved.image(), saved.manifest()].map(|name| {
            let file = File::open(&name).unwrap();
            fs::remove_file(name).unwrap();
            file
        });
        fs::remove_dir(saved.place.path()).unwrap();
        Self { saved, image, manifest }
    }

    fn copied(&self) -> Saved {
        let place = tempfile::Builder::new().prefix("towline-lab-").tempdir().unwrap();
        let Saved { version, tick, counter, .. } = self.saved;
        let (kernel, hash) = (self.saved.kernel.clone(), self.saved.hash.clone());
        let copy = Saved { place, version, kernel, hash, tick, counter };
        for (file, name) in [(&self.image, copy.image()), (&self.manifest, copy.manifest())] {
            let open = format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd());
            let copied =
                Command::new("cp").args(["--sparse=always", "--reflink=auto", &open, &name]).status();
            assert!(copied.unwrap().success(), "cp {open} {name}");
        }
        copy
    }
}

/// A guest that is saved.
pub(crate) struct Recipe<'a> {
    pub(crate) version: Version,
    pub(crate) kernel: Kernel,
    /// Number of its processors.
    pub(crate) processors: u32,
    /// More arguments of its QEMU.
    pub(crate) arguments: &'a [String],
    /// Line of shell that it runs before it is saved.
    pub(crate) line: &'a str,
    /// Interval of its counter, if another one than the agent's.
    pub(crate) interval: Option<Duration>,
}

impl Default for Recipe<'_> {
    fn default() -> Self {
        Self {
            version: Version::V10_0,
            kernel: Kernel::Debian12,
            processors: 2,
            arguments: &[],
            line: ":",
            interval: None,
        }
    }
}

impl Saved {
    /// A guest that has filled a part of its memory, as towline stored it. One of QEMU 10.0 is booted for all
    /// tests of this program, each of which has a copy of the image.
    pub(crate) fn new(version: Version) -> Self {
        static TEMPLATE: OnceLock<Template> = OnceLock::new();
        if version == Version::V10_0 {
            return TEMPLATE.get_or_init(|| Template::of(Self::of(&Recipe::default()))).copied();
        }
        Self::of(&Recipe { version, ..Recipe::default() })
    }

    /// As [`Saved::new`], with a drive `disk0` of [`DISK`] bytes, which the guest has not read. Each test gives it its own file.
    pub(crate) fn with_drive() -> Self {
        static TEMPLATE: OnceLock<Template> = OnceLock::new();
        let boot = || {
            let place = tempfile::Builder::new().prefix("towline-lab-").tempdir().unwrap();
            let disk = place.path().join("disk.raw");
            File::create(&disk).unwrap().set_len(DISK).unwrap();
            let drive = format!("file={},format=raw,if=none,id=disk0", disk.display());
            let arguments = ["-drive", &drive, "-device", "virtio-blk-pci,drive=disk0"].map(str::to_owned);
            let saved = Self::in_place(place, &Recipe { arguments: &arguments, ..Recipe::default() });
            fs::remove_file(disk).unwrap();
            Template::of(saved)
        };
        TEMPLATE.get_or_init(boot).copied()
    }

    /// As [`Saved::new`], with this guest.
    pub(crate) fn of(recipe: &Recipe<'_>) -> Self {
        let place = tempfile::Builder::new().prefix("towline-lab-").tempdir().unwrap();
        Self::in_place(place, recipe)
    }

    /// As [`Saved::of`], in a directory that has the guest's disks.
    pub(crate) fn in_place(place: TempDir, recipe: &Recipe<'_>) -> Self {
        let version = recipe.version;
        let guest = Qemu::builder(version).machine(Version::V10_0.machine()).cpu("Nehalem");
        let guest = guest.linux().kernel(recipe.kernel).args(recipe.arguments.iter().cloned());
        let (source, mut linux) =
            guest.memory_mib(MEMORY_MIB).processors(recipe.processors).boot(WITHIN).unwrap();
        linux.shell(recipe.line, WITHIN).unwrap();
        recipe.interval.iter().for_each(|interval| linux.set_interval(*interval).unwrap());
        linux.fill(FILLED, 5).unwrap();
        let (hash, tick) = (linux.hash().unwrap(), linux.wait_ticking(WITHIN).unwrap());
        let address = linux.tick_address().unwrap();
        let kernel = source.kernel_options().unwrap();
        let mut saved = Self { place, version, kernel, hash, tick, counter: address };
        towline(["copy", &qmp(&source), &saved.image()]).unwrap().wait_done(WITHIN).unwrap();
        // It has been paused since it was saved.
        saved.tick = source.read_u64(address).unwrap();
        saved
    }

    /// Name of the image's manifest.
    fn manifest(&self) -> String {
        format!("{}.manifest.json", self.image())
    }

    pub(crate) fn image(&self) -> String {
        self.place.path().join("guest.img").display().to_string()
    }

    /// A path beside the image.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.place.path().join(name)
    }

    /// Memory that all clones have in common.
    pub(crate) fn filled(&self) -> u64 {
        FILLED
    }

    /// Event of `towline inspect`.
    pub(crate) fn inspect(&self) -> Value {
        let finished = towline(["inspect", "--json", &self.image()]).unwrap().wait_done(WITHIN).unwrap();
        serde_json::from_str(finished.stdout.lines().last().unwrap()).unwrap()
    }

    /// The file is what it was.
    pub(crate) fn assert_intact(&self) {
        towline(["inspect", "--verify", &self.image()]).unwrap().wait_done(WITHIN).unwrap();
    }

    /// The guest's settings as words of a command.
    pub(crate) fn set(&self) -> Vec<String> {
        self.settings().into_iter().flat_map(|setting| ["--set".to_owned(), setting]).collect()
    }

    /// Values of this host for the guest's command line.
    pub(crate) fn settings(&self) -> Vec<String> {
        self.settings_in("{name}.agent")
    }

    /// As [`Saved::settings`], with the agent at this socket.
    pub(crate) fn settings_in(&self, socket: &str) -> Vec<String> {
        let socket = self.place.path().join(socket).display().to_string();
        let [_, kernel, _, initrd, _, append] = self.kernel.as_slice() else { panic!("{:?}", self.kernel) };
        vec![
            format!("kernel={kernel}"),
            format!("initrd={initrd}"),
            format!("append={append}"),
            format!("chardev.agent=socket,path={socket},server=on,wait=off"),
            "serial.1=chardev:agent".to_owned(),
        ]
    }

    /// Starts `towline run`.
    pub(crate) fn run(&self, options: &[&str], settings: &[String]) -> Towline {
        let settings = settings.iter().flat_map(|setting| ["--set", setting.as_str()]);
        self.start(options.iter().copied().chain(settings).map(str::to_owned).collect())
    }

    /// Starts `towline run` of another image of the guest, with the settings.
    pub(crate) fn run_image(&self, image: &str, options: &[&str]) -> Towline {
        let settings = self.settings();
        let settings = settings.iter().flat_map(|setting| ["--set", setting.as_str()]);
        let words = ["run", image].into_iter().chain(options.iter().copied()).chain(settings);
        self.towline(words.map(str::to_owned))
    }

    /// Starts `towline run` with the settings and more arguments of QEMU.
    pub(crate) fn run_with_more(&self, options: &[&str], arguments: &[&str]) -> Towline {
        let settings = self.settings();
        let settings = settings.iter().flat_map(|setting| ["--set", setting.as_str()]);
        let words = options.iter().copied().chain(settings).chain(["--"]).chain(arguments.iter().copied());
        self.start(words.map(str::to_owned).collect())
    }

    /// Starts `towline run` of an image that has no command line, with all arguments of the guest.
    pub(crate) fn run_with_arguments(&self, options: &[&str]) -> Towline {
        let socket = self.place.path().join("{name}.agent").display().to_string();
        let agent = format!("socket,id=agent,path={socket},server=on,wait=off");
        let memory = format!("{MEMORY_MIB}M");
        let own = [
            "--",
            "-nodefaults",
            "-no-user-config",
            "-no-reboot",
            "-machine",
            Version::V10_0.machine(),
            "-accel",
            "tcg,thread=multi",
            "-cpu",
            "Nehalem",
            "-m",
            &memory,
            "-smp",
            "2",
            "-serial",
            "null",
            "-chardev",
            &agent,
            "-serial",
            "chardev:agent",
        ];
        let words = options.iter().chain(&own).map(|word| (*word).to_owned());
        self.start(words.chain(self.kernel.iter().cloned()).collect())
    }

    fn start(&self, words: Vec<String>) -> Towline {
        self.start_image(&self.image(), words)
    }

    fn start_image(&self, image: &str, words: Vec<String>) -> Towline {
        let before = ["run".to_owned(), image.to_owned(), "--qemu".to_owned(), self.binary()];
        self.towline(before.into_iter().chain(words))
    }

    /// Path of the QEMU.
    pub(crate) fn binary(&self) -> String {
        self.version.command().get_program().to_str().unwrap().to_owned()
    }

    /// Starts a towline whose guests are those of this test.
    pub(crate) fn towline(&self, words: impl IntoIterator<Item = String>) -> Towline {
        self.towline_within(&[], words)
    }

    /// As [`Saved::towline`], after the words of a program that it replaces.
    pub(crate) fn towline_within(
        &self,
        prefix: &[String],
        words: impl IntoIterator<Item = String>,
    ) -> Towline {
        let directory = format!("XDG_RUNTIME_DIR={}", self.place.path().display());
        let program = towline_binary().unwrap().display().to_string();
        // `env` is replaced by towline, under the same process id.
        let env = ["/usr/bin/env".to_owned(), directory, program];
        let mut line = prefix.iter().cloned().chain(env).chain(words);
        let first = line.next().unwrap();
        Towline::start(first.as_ref(), line).unwrap()
    }

    /// Runs `towline ctl` for a guest to its end; returns the reply.
    pub(crate) fn ctl(&self, words: &[&str]) -> Value {
        let words = ["ctl"].iter().chain(words).map(|word| (*word).to_owned());
        let finished = self.towline(words).wait_done(WITHIN).unwrap();
        serde_json::from_str(&finished.stdout).unwrap()
    }

    /// Names of the guests, as `towline ps` lists them.
    pub(crate) fn guests(&self) -> Vec<String> {
        self.listed().iter().map(|guest| guest["name"].as_str().unwrap().to_owned()).collect()
    }

    /// The events of `towline ps`.
    pub(crate) fn listed(&self) -> Vec<Value> {
        let words = ["ps", "--json"].map(str::to_owned);
        let finished = self.towline(words).wait_done(WITHIN).unwrap();
        let events = finished.stdout.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        events.filter(|event| event["event"] == "guest").collect()
    }

    pub(crate) fn pid(&self, name: &str) -> u64 {
        let listed = self.listed();
        let guest = listed.iter().find(|guest| guest["name"] == name);
        guest.and_then(|guest| guest["pid"].as_u64()).unwrap()
    }

    /// The runtime directory of a guest.
    pub(crate) fn directory(&self, name: &str) -> PathBuf {
        self.place.path().join("towline/guests").join(name)
    }

    /// Waits until the guest runs, and checks that it is the saved one.
    pub(crate) fn assert_runs(&self, run: &mut Towline, name: &str) {
        self.assert_runs_after(run, name, &format!("{name} runs, qmp:"));
    }

    /// As [`Saved::assert_runs`], of a towline that writes `line` then.
    pub(crate) fn assert_runs_after(&self, run: &mut Towline, name: &str, line: &str) {
        let result = wait_until("a guest that runs", WITHIN, || {
            assert!(run.runs()?, "towline has ended: {}{}", run.stdout(), run.stderr());
            Ok(run.stdout().contains(line).then_some(()))
        });
        result.unwrap_or_else(|error| panic!("{error:#}: {}{}", run.stdout(), run.stderr()));
        self.assert_is_saved_guest(&mut self.agent(name));
    }

    /// The agent of a guest that runs.
    pub(crate) fn agent(&self, name: &str) -> LinuxGuest {
        let mut linux = LinuxGuest::connect_at(&self.place.path().join(format!("{name}.agent"))).unwrap();
        linux.wait_ready(WITHIN).unwrap();
        linux
    }

    /// The guest ticks on, with the memory that it had.
    pub(crate) fn assert_is_saved_guest(&self, linux: &mut LinuxGuest) {
        assert!(linux.wait_ticking(WITHIN).unwrap() > self.tick);
        assert_eq!(linux.hash().unwrap(), self.hash);
    }

    /// Waits until the guest of this process steps its counter, which is read from its memory, mapped from
    /// the image: the guest has no work with it.
    pub(crate) fn wait_first_tick(&self, pid: u64) {
        self.wait_first_tick_in(pid, &self.image());
    }

    /// As [`Saved::wait_first_tick`], with memory that is mapped from the file whose path ends like this.
    pub(crate) fn wait_first_tick_in(&self, pid: u64, file: &str) {
        self.wait_tick(pid, file, self.tick);
    }

    /// Waits until the counter of the guest of this process, whose memory is mapped from the file whose path ends like this, is above
    /// `past`.
    pub(crate) fn wait_tick(&self, pid: u64, file: &str, past: u64) {
        let maps = fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
        let mapping = maps.lines().find(|line| line.ends_with(file)).unwrap();
        let start = u64::from_str_radix(mapping.split_once('-').unwrap().0, 16).unwrap();
        let memory = fs::File::open(format!("/proc/{pid}/mem")).unwrap();
        let read = || {
            let mut word = [0; 8];
            memory.read_exact_at(&mut word, start + self.counter).map(|()| u64::from_le_bytes(word))
        };
        wait_until("a guest that ticks", WITHIN * 5, || Ok((read()? > past).then_some(()))).unwrap();
    }

    /// The monitor of a guest.
    pub(crate) fn monitor(&self, name: &str) -> Qmp {
        Qmp::connect(&self.directory(name).join("qmp.sock"), WITHIN).unwrap()
    }

    /// Waits until these are the guests of this test.
    pub(crate) fn wait_for_guests(&self, names: &[&str]) {
        wait_until("the end of guests", WITHIN, || Ok((self.guests() == names).then_some(()))).unwrap();
    }

    /// Kills the QEMU of a guest.
    pub(crate) fn kill(&self, name: &str) {
        signal(u32::try_from(self.pid(name)).unwrap(), Signal::KILL);
    }

    /// Ends a guest by its monitor.
    pub(crate) fn quit(&self, name: &str) {
        self.monitor(name).execute("quit", Value::Null).unwrap();
    }

    /// Ends towline as Ctrl-C does, and checks that its guest is gone.
    pub(crate) fn interrupt_one(&self, run: Towline, name: &str) {
        assert!(self.guests().iter().any(|guest| guest == name));
        signal(run.pid(), Signal::INT);
        run.wait_done(WITHIN).unwrap();
        assert!(!self.guests().iter().any(|guest| guest == name) && !self.directory(name).exists());
    }

    /// Ends towline as Ctrl-C does, and checks that nothing is left.
    pub(crate) fn interrupt(&self, run: Towline) {
        let listed = self.listed();
        assert!(!listed.is_empty());
        signal(run.pid(), Signal::INT);
        run.wait_done(WITHIN).unwrap();
        for guest in &listed {
            let pid = &guest["pid"];
            assert!(!PathBuf::from(format!("/proc/{pid}")).exists(), "process {pid} is left");
        }
        assert_eq!(fs::read_dir(self.place.path().join("towline/guests")).unwrap().count(), 0);
    }

    /// Proportional set size of the RAM that a guest maps from the image, in bytes.
    pub(crate) fn ram_pss(&self, name: &str) -> u64 {
        ram_pss_of(self.pid(name))
    }
}

/// Proportional set size of this process, in bytes.
pub(crate) fn pss_of(pid: u64) -> u64 {
    let rollup = fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).unwrap();
    let pss = rollup.lines().find_map(|line| line.strip_prefix("Pss:")).unwrap();
    pss.trim().strip_suffix(" kB").unwrap().parse::<u64>().unwrap() << 10
}

/// Proportional set size of the RAM that this process maps from the image, in bytes.
pub(crate) fn ram_pss_of(pid: u64) -> u64 {
    ram_pss_in(pid, "/guest.img")
}

/// As [`ram_pss_of`], of RAM that is mapped from a file whose path ends like this.
pub(crate) fn ram_pss_in(pid: u64, file: &str) -> u64 {
    let smaps = fs::read_to_string(format!("/proc/{pid}/smaps")).unwrap();
    let (mut is_ram, mut kib) = (false, 0);
    for line in smaps.lines() {
        if let Some(pss) = line.strip_prefix("Pss:").filter(|_| is_ram) {
            kib += pss.trim().strip_suffix(" kB").unwrap().parse::<u64>().unwrap();
        } else if line.split(' ').next().is_some_and(|word| word.contains('-')) {
            is_ram = line.ends_with(file);
        }
    }
    assert!(kib > 0, "process {pid} maps no image");
    kib << 10
}
