//! A QEMU of the lab: its description, start and end.

mod boot_sector;
mod small_guest;
mod virtqueues;

use std::fs::File;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use tempfile::TempDir;

pub use boot_sector::BootSector;

use crate::network::Network;
use crate::paths::Kernel;
use crate::process::KilledChild;
use crate::qmp::Qmp;
use crate::wait::wait_until;
use crate::{guest_programs, paths, process};

/// Time limit of a QEMU's start until its monitor answers.
const START_WITHIN: Duration = Duration::from_secs(60);
const DEFAULT_MEMORY_MIB: u64 = 128;
/// Kernel command line of a Linux guest. Without `cryptomgr.notests` the kernel tests its ciphers for a fifth of an emulated boot; without
/// `no_timer_check` it panics where a busy host delays an emulated timer's first interrupts.
const KERNEL_COMMAND_LINE: &str = "console=ttyS0 quiet mitigations=off panic=-1 init_on_alloc=0 \
    random.trust_cpu=on cryptomgr.notests no_timer_check";
/// Name of the guest's memory block in the stream, with any backend.
pub(crate) const RAM_NAME: &str = "pc.ram";

/// A QEMU that the set-up installs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Version {
    /// Debian backports' QEMU 10.0.
    V10_0,
    /// Debian 12's own QEMU 7.2.
    V7_2,
    /// Debian 13's own, 10.0 with later fixes. Not on every machine, see
    /// [`require_qemu`](crate::require_qemu).
    Stable,
    /// The newest in Debian 13's backports: 11.1. Not on every machine either.
    Newest,
}

/// Backing of the guest's memory. The block is called `pc.ram` either way, so both kinds can be each other's
/// destination.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MemoryBackend {
    /// QEMU's default: private anonymous memory.
    Default,
    /// A shared memfd, its pages touched at start or not.
    Memfd {
        /// True if QEMU touches every page before it starts.
        prealloc: bool,
    },
}

/// Software that runs in the guest.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Guest {
    /// Firmware only.
    None,
    /// Linux with the lab's agent.
    Linux,
    /// A few instructions that fill memory and count.
    BootSector(BootSector),
}

/// A QEMU to be started. Cheap to clone: a destination is a clone of its source with [`Builder::incoming`].
#[derive(Debug, Clone)]
pub struct Builder {
    version: Version,
    machine: String,
    memory_mib: u64,
    backend: MemoryBackend,
    processors: u32,
    cpu: String,
    incoming: Option<String>,
    guest: Guest,
    kernel: Kernel,
    guest_programs: Vec<PathBuf>,
    kernel_arguments: String,
    arguments: Vec<String>,
    /// Command prefix before the emulator's own command.
    prefix: Vec<String>,
    /// Directory of its files; `None`: a temporary one.
    directory: Option<PathBuf>,
}

/// A running QEMU. Dropping it kills the process and removes its files; it dies with this process as well.
pub struct Qemu {
    child: Mutex<KilledChild>,
    qmp: Qmp,
    version: Version,
    guest: Guest,
    /// Its sockets and files.
    directory: PathBuf,
    // Last, so the process is gone when its directory goes. `None`: the directory is the caller's, and stays.
    _temporary: Option<TempDir>,
}

impl Version {
    /// Machine type of the lab's guests on this QEMU: its own newest q35.
    pub fn machine(self) -> &'static str {
        static STABLE: LazyLock<String> = LazyLock::new(|| machine_of("qemu-stable"));
        static NEWEST: LazyLock<String> = LazyLock::new(|| machine_of("qemu-newest"));
        match self {
            Self::V10_0 => "pc-q35-10.0",
            Self::V7_2 => "pc-q35-7.2",
            Self::Stable => &STABLE,
            Self::Newest => &NEWEST,
        }
    }

    /// Returns true if QEMU tracks the writes of an emulated guest. Before 9.0 its writes to a page are lost
    /// to the migration from the second synchronisation of the dirty log on, for any receiver (QEMU's
    /// "physmem: Fix migration dirty bitmap coherency with TCG memory access").
    pub fn tracks_emulated_writes(self) -> bool {
        self != Self::V7_2
    }

    /// Command that starts it, with the paths that it needs.
    pub fn command(self) -> Command {
        match self {
            Self::V10_0 => Command::new(paths::QEMU_10_0),
            Self::V7_2 => {
                let tree = paths::lab_directory().join("qemu-7.2");
                let mut command = Command::new(tree.join("usr/bin/qemu-system-x86_64"));
                let libraries = ["usr/lib/x86_64-linux-gnu", "lib/x86_64-linux-gnu"];
                let libraries = libraries.map(|directory| tree.join(directory).display().to_string());
                command.env("LD_LIBRARY_PATH", libraries.join(":"));
                for firmware in ["usr/share/qemu", "usr/share/seabios", "usr/lib/ipxe/qemu"] {
                    command.arg("-L").arg(tree.join(firmware));
                }
                command
            }
            Self::Stable => unpacked("qemu-stable"),
            Self::Newest => unpacked("qemu-newest"),
        }
    }

    /// First of its parts that the set-up has not installed.
    pub(crate) fn missing(self) -> Option<PathBuf> {
        let program = PathBuf::from(self.command().get_program());
        (!program.is_file()).then_some(program)
    }
}

/// Command of a QEMU of another Debian, with its own C library: a script in its directory execs the emulator.
fn unpacked(directory: &str) -> Command {
    Command::new(paths::lab_directory().join(directory).join("qemu-system-x86_64"))
}

/// Machine type of its release; the short name where it is not installed, which no QEMU starts.
fn machine_of(directory: &str) -> String {
    let version = paths::lab_directory().join(directory).join("version");
    let version = std::fs::read_to_string(version).unwrap_or_default();
    let mut numbers = version.split('.');
    match (numbers.next(), numbers.next()) {
        (Some(major), Some(minor)) => format!("pc-q35-{major}.{minor}"),
        _ => "q35".to_owned(),
    }
}

impl Builder {
    /// `-machine`; the default is the version's own [`Version::machine`].
    pub fn machine(mut self, machine: &str) -> Self {
        machine.clone_into(&mut self.machine);
        self
    }

    /// Guest memory in MiB; 128 by default.
    pub fn memory_mib(mut self, memory_mib: u64) -> Self {
        self.memory_mib = memory_mib;
        self
    }

    /// Backing of the memory.
    pub fn memory_backend(mut self, backend: MemoryBackend) -> Self {
        self.backend = backend;
        self
    }

    /// Virtual processors; 1 by default.
    pub fn processors(mut self, processors: u32) -> Self {
        self.processors = processors;
        self
    }

    /// `-cpu`; `max` by default, which must not be moved between versions. `Nehalem` may.
    pub fn cpu(mut self, model: &str) -> Self {
        model.clone_into(&mut self.cpu);
        self
    }

    /// `-incoming URI`: makes it a destination.
    pub fn incoming(mut self, uri: &str) -> Self {
        self.incoming = Some(uri.to_owned());
        self
    }

    /// `-incoming defer`: `migrate-incoming` follows later.
    pub fn incoming_defer(self) -> Self {
        self.incoming("defer")
    }

    /// Linux with the lab's agent, and 256 MiB unless more memory was requested so far.
    pub fn linux(mut self) -> Self {
        self.memory_mib = self.memory_mib.max(256);
        self.guest = Guest::Linux;
        self
    }

    /// Kernel of a Linux guest; Debian 12's by default.
    pub fn kernel(mut self, kernel: Kernel) -> Self {
        self.kernel = kernel;
        self
    }

    /// Programs of this machine that the Linux guest has in its `/bin`, with the libraries that they need.
    pub fn guest_programs<I: IntoIterator<Item: Into<PathBuf>>>(mut self, programs: I) -> Self {
        self.guest_programs.extend(programs.into_iter().map(Into::into));
        self
    }

    /// The small guest that fills memory and counts.
    pub fn boot_sector(mut self, boot_sector: BootSector) -> Self {
        self.guest = Guest::BootSector(boot_sector);
        self
    }

    /// `-S`: the processors wait for `cont`.
    pub fn paused(self) -> Self {
        self.args(["-S"])
    }

    /// Appends to the kernel command line of a Linux guest.
    pub fn kernel_arguments(mut self, arguments: &str) -> Self {
        arguments.clone_into(&mut self.kernel_arguments);
        self
    }

    /// Appends arguments of QEMU, after the lab's own.
    pub fn args<I: IntoIterator<Item: Into<String>>>(mut self, arguments: I) -> Self {
        self.arguments.extend(arguments.into_iter().map(Into::into));
        self
    }

    /// Starts it in a network namespace.
    pub fn within(self, network: &Network) -> Self {
        self.prefixed(network.prefix())
    }

    /// Has its sockets and files in this directory, which is created if necessary and stays.
    pub fn directory(mut self, directory: impl Into<PathBuf>) -> Self {
        self.directory = Some(directory.into());
        self
    }

    /// Starts it by a command, which gets QEMU's command line as its last arguments and becomes QEMU.
    pub fn prefixed<I: IntoIterator<Item: Into<String>>>(mut self, words: I) -> Self {
        self.prefix = words.into_iter().map(Into::into).collect();
        self
    }

    /// Makes its files, starts it and waits until its monitor answers.
    pub fn start(self) -> Result<Qemu> {
        let (directory, temporary) = match &self.directory {
            Some(path) => {
                std::fs::create_dir_all(path).with_context(|| path.display().to_string())?;
                (path.clone(), None)
            }
            None => {
                let temporary = tempfile::Builder::new().prefix("towline-lab-").tempdir()?;
                (temporary.path().to_owned(), Some(temporary))
            }
        };
        let mut command = self.command(&directory)?;
        let Self { version, guest, .. } = self;
        let stderr = directory.join("stderr");
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(File::create(&stderr)?);
        let program = command.get_program().to_owned();
        let child = process::spawn(command);
        let mut child = child.with_context(|| {
            format!("{} cannot be started; run `cargo xtask setup`", program.to_string_lossy())
        })?;
        let qmp = connect(&mut child.0, &directory.join("lab.qmp"), &stderr).with_context(|| {
            let text = std::fs::read_to_string(&stderr).unwrap_or_default();
            format!("QEMU did not start; it wrote: {}", text.trim())
        })?;
        let child = Mutex::new(child);
        Ok(Qemu { child, qmp, version, guest, directory, _temporary: temporary })
    }

    /// Command that starts it with its files in this directory, some of which are made.
    pub(crate) fn command(&self, directory: &Path) -> Result<Command> {
        let mut command = self.version.command();
        let mut machine = self.machine.clone();
        if let MemoryBackend::Memfd { prealloc } = self.backend {
            let prealloc = if prealloc { "on" } else { "off" };
            let size = self.memory_mib;
            command
                .arg("-object")
                .arg(format!("memory-backend-memfd,id={RAM_NAME},size={size}M,share=on,prealloc={prealloc}"));
            machine = format!("{machine},memory-backend={RAM_NAME}");
        }
        let counts_instructions = self.arguments.iter().any(|argument| argument == "-icount");
        let accelerator = if counts_instructions { "tcg,thread=single" } else { "tcg,thread=multi" };
        command.args(["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"]);
        command.args(["-machine", &machine, "-accel", accelerator, "-cpu", &self.cpu]);
        command.args(["-m", &format!("{}M", self.memory_mib), "-smp", &self.processors.to_string()]);
        for (id, socket) in [("lab", "lab.qmp"), ("towline", "qmp")] {
            let path = directory.join(socket);
            command.arg("-chardev").arg(format!("socket,id={id},path={},server=on,wait=off", path.display()));
            command.arg("-mon").arg(format!("chardev={id},mode=control"));
        }
        command.arg("-serial").arg(format!("file:{}", directory.join("console").display()));
        let serial = directory.join("serial");
        command.arg("-chardev").arg(format!("socket,id=agent,path={},server=on,wait=off", serial.display()));
        command.args(["-serial", "chardev:agent"]);
        if let Some(uri) = &self.incoming {
            command.args(["-incoming", uri]);
        }
        self.guest_arguments(&mut command, directory)?;
        command.args(&self.arguments);
        let Some((first, rest)) = self.prefix.split_first() else { return Ok(command) };
        let mut prefixed = Command::new(first);
        prefixed.args(rest).arg(command.get_program()).args(command.get_args());
        prefixed.envs(command.get_envs().filter_map(|(key, value)| Some((key, value?))));
        Ok(prefixed)
    }

    fn guest_arguments(&self, command: &mut Command, directory: &Path) -> Result<()> {
        match &self.guest {
            Guest::None => {}
            Guest::Linux => {
                let lab = paths::lab_directory();
                let kernel =
                    paths::kernel(&lab, self.kernel).context("no kernel; run `cargo xtask setup`")?;
                let mut archive = paths::initramfs(&lab, self.kernel);
                if !self.guest_programs.is_empty() {
                    archive = guest_programs::archive(&archive, &self.guest_programs, directory)?;
                }
                command.arg("-kernel").arg(kernel).arg("-initrd").arg(archive);
                command.args(["-append", &format!("{KERNEL_COMMAND_LINE} {}", self.kernel_arguments)]);
            }
            Guest::BootSector(boot_sector) => {
                let image = directory.join("guest");
                std::fs::write(&image, boot_sector.image(self.memory_mib)?)?;
                command.arg("-kernel").arg(image);
            }
        }
        Ok(())
    }
}

impl Qemu {
    /// A QEMU of this version: q35, TCG, `-cpu max`, one processor, 128 MiB, no devices, no guest.
    pub fn builder(version: Version) -> Builder {
        Builder {
            version,
            machine: version.machine().to_owned(),
            memory_mib: DEFAULT_MEMORY_MIB,
            backend: MemoryBackend::Default,
            processors: 1,
            cpu: "max".to_owned(),
            incoming: None,
            guest: Guest::None,
            kernel: Kernel::Debian12,
            guest_programs: Vec::new(),
            kernel_arguments: String::new(),
            arguments: Vec::new(),
            prefix: Vec::new(),
            directory: None,
        }
    }

    /// The lab's QMP client, on a separate monitor.
    pub fn qmp(&self) -> &Qmp {
        &self.qmp
    }

    /// Path of a second QMP socket, free for towline or a test. QEMU serves one client at a time on it.
    pub fn qmp_path(&self) -> PathBuf {
        self.directory.join("qmp")
    }

    /// Path of the serial port that the agent listens on.
    pub fn serial_path(&self) -> PathBuf {
        self.directory.join("serial")
    }

    /// Directory of its files, which is removed with this QEMU unless the builder named it.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Process ID of the emulator.
    pub fn pid(&self) -> u32 {
        self.child().0.id()
    }

    /// Version.
    pub fn version(&self) -> Version {
        self.version
    }

    /// The options of a Linux guest's kernel, each with its value.
    pub fn kernel_options(&self) -> Result<Vec<String>> {
        let line = std::fs::read_to_string(format!("/proc/{}/cmdline", self.pid()))?;
        let words: Vec<String> = line.split('\0').map(str::to_owned).collect();
        let mut found = Vec::new();
        for option in ["-kernel", "-initrd", "-append"] {
            let at = words.iter().position(|word| word == option);
            let at = at.with_context(|| format!("the guest has no {option}"))?;
            found.extend_from_slice(&words[at..at + 2]);
        }
        Ok(found)
    }

    /// QEMU's standard error so far.
    pub fn stderr(&self) -> String {
        std::fs::read_to_string(self.directory.join("stderr")).unwrap_or_default()
    }

    /// Console output of the guest's kernel so far.
    pub fn console(&self) -> String {
        let console = std::fs::read(self.directory.join("console")).unwrap_or_default();
        String::from_utf8_lossy(&console).into_owned()
    }

    /// Exit status, if it has exited.
    pub fn exited(&self) -> Result<Option<ExitStatus>> {
        Ok(self.child().0.try_wait()?)
    }

    /// Waits until it exits without being ended.
    pub fn wait_exit(&self, within: Duration) -> Result<ExitStatus> {
        wait_until(&format!("end of QEMU {}", self.pid()), within, || self.exited())
    }

    /// Kills it (SIGKILL) and waits until it has exited.
    pub fn kill(&self) -> Result<()> {
        Ok(self.child().kill()?)
    }

    fn child(&self) -> MutexGuard<'_, KilledChild> {
        self.child.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Waits for the monitor while the process lives.
fn connect(child: &mut Child, socket: &Path, stderr: &Path) -> Result<Qmp> {
    let stream = wait_until("QEMU's monitor", START_WITHIN, || {
        if let Some(status) = child.try_wait()? {
            bail!("QEMU ended with {status}");
        }
        // Its file does not exist yet, or QEMU does not listen on it yet.
        Ok(UnixStream::connect(socket).ok())
    })?;
    Qmp::over(stream, START_WITHIN, Some(stderr.into()))
}
