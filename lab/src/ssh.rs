//! OpenSSH's server of Debian: its parts, its keys, and a host that is reached by it.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use tempfile::TempDir;

use crate::process::KilledChild;
use crate::wait::wait_until;
use crate::{Network, Qmp, paths, process, skip, towline_binary};

/// Programs that sshd starts since OpenSSH 9.8 and 10.0, below the directory that it was unpacked to, and the options for their paths.
const STARTED_BY_SSHD: [(&str, &str); 2] =
    [("usr/lib/openssh/sshd-session", "SshdSessionPath"), ("usr/lib/openssh/sshd-auth", "SshdAuthPath")];
const STARTS_WITHIN: Duration = Duration::from_secs(60);
/// The user of sshd's unprivileged part, which a machine without the package does not have.
const SSHD_USER: &str = "sshd:x:65533:65534::/run/sshd:/usr/sbin/nologin\n";

/// A Debian sshd whose libraries, and those of the programs that it starts, are on this machine.
pub struct Sshd(PathBuf);

/// Networks of two hosts, as [`Network::pair`]; `None`: none can be made here, and the test is skipped.
pub fn host_networks(test: &str, addresses: [&str; 2]) -> Option<[Network; 2]> {
    Network::pair(addresses)
        .inspect_err(|error| skip(test, &format!("no network namespaces can be made here: {error:#}")))
        .ok()
}

impl Sshd {
    /// Finds it, or prints the skip of the test `name`.
    pub fn find(name: &str) -> Option<Self> {
        let sshd = Self(paths::lab_directory().join("openssh-server/usr/sbin/sshd"));
        if !sshd.0.is_file() {
            skip(name, &format!("{} is missing; run `cargo xtask setup`", sshd.0.display()));
            return None;
        }
        for program in sshd.started().into_iter().map(|(program, _)| program).chain([sshd.0.clone()]) {
            let libraries = Command::new("ldd").arg(&program).output().ok()?;
            let libraries = String::from_utf8_lossy(&libraries.stdout);
            if let Some(line) = libraries.lines().find(|line| line.contains("not found")) {
                let program = program.display();
                skip(name, &format!("{program} lacks a library on this machine: {}", line.trim()));
                return None;
            }
        }
        Some(sshd)
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Programs that it starts, with the options for their paths.
    pub fn started(&self) -> Vec<(PathBuf, &'static str)> {
        let root = self.0.ancestors().nth(3).expect("it is below usr/sbin");
        let programs = STARTED_BY_SSHD.map(|(program, option)| (root.join(program), option));
        programs.into_iter().filter(|(program, _)| program.is_file()).collect()
    }
}

/// Makes a key in `directory`. Returns its public part.
pub fn ssh_key(directory: &Path, name: &str) -> Result<String> {
    let file = directory.join(name);
    let mut keygen = Command::new("ssh-keygen");
    keygen.args(["-q", "-t", "ed25519", "-N", "", "-C", "test", "-f"]).arg(&file);
    ensure!(keygen.status()?.success(), "ssh-keygen");
    Ok(fs::read_to_string(file.with_extension("pub"))?)
}

/// Starts sshd, whose files are in `place`.
fn start(sshd: &Sshd, network: &Network, place: &Path) -> Result<KilledChild> {
    let here = place.display();
    let script = format!(
        "mount -t tmpfs -o mode=755 tmpfs /run && mkdir /run/sshd && mount --bind {here}/passwd /etc/passwd && \
         exec {} -D -e -f {here}/sshd_config",
        sshd.path().display()
    );
    let mut command = process::command_after(&network.prefix());
    command.args(["unshare", "--mount", "sh", "-c", &script]);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(File::create(place.join("log"))?);
    process::spawn(command).context("sshd")
}

/// A host with an sshd: a network, with a `/run` of its own. It shares all other files with this machine. `towline` is in its PATH.
pub struct SshHost {
    network: Network,
    sshd: KilledChild,
    place: TempDir,
}

impl SshHost {
    /// Starts sshd at this address of a network.
    pub fn new(sshd: &Sshd, network: Network, address: &str) -> Result<Self> {
        let place = tempfile::Builder::new().prefix("towline-lab-").tempdir()?;
        let path = |name: &str| place.path().join(name);
        ssh_key(place.path(), "host")?;
        fs::write(path("authorized"), ssh_key(place.path(), "user")?)?;
        fs::write(path("passwd"), fs::read_to_string("/etc/passwd")? + SSHD_USER)?;
        fs::create_dir(path("bin"))?;
        std::os::unix::fs::symlink(towline_binary()?, path("bin/towline"))?;
        let here = place.path().display();
        let started =
            sshd.started().into_iter().map(|(program, option)| format!("{option} {}\n", program.display()));
        let config = format!(
            "ListenAddress {address}\nHostKey {here}/host\nAuthorizedKeysFile {here}/authorized\nPidFile none\nUsePAM no\n\
             StrictModes no\nUseDNS no\nPermitRootLogin prohibit-password\nSetEnv PATH={here}/bin:/usr/bin:/bin\n{}",
            started.collect::<String>()
        );
        fs::write(path("sshd_config"), config)?;
        let client = format!(
            "Host other\n  HostName {address}\n  User root\n  IdentityFile {here}/user\n  IdentitiesOnly yes\n  BatchMode yes\n  \
             UserKnownHostsFile {here}/known\n  StrictHostKeyChecking accept-new\n  LogLevel ERROR\n"
        );
        fs::write(path("config"), client)?;
        let host = Self { sshd: start(sshd, &network, place.path())?, network, place };
        host.wait_listening()?;
        Ok(host)
    }

    /// Starts the sshd of a host whose processes have all died, with another `/run`.
    pub fn restart(&mut self, sshd: &Sshd) -> Result<()> {
        let _ = self.sshd.0.wait();
        self.sshd = start(sshd, &self.network, self.place.path())?;
        self.wait_listening()
    }

    fn wait_listening(&self) -> Result<()> {
        wait_until("sshd", STARTS_WITHIN, || Ok(self.log().contains("Server listening").then_some(())))
            .with_context(|| self.log())
    }

    /// Log of its sshd.
    pub fn log(&self) -> String {
        fs::read_to_string(self.place.path().join("log")).unwrap_or_default()
    }

    /// Its network.
    pub fn network(&self) -> &Network {
        &self.network
    }

    /// OpenSSH's client with the configuration for this host, which it names `other`.
    pub fn client(&self) -> String {
        format!("ssh -F {}", self.place.path().join("config").display())
    }

    /// Files that the client needs, for a guest, which has none of this machine.
    pub fn client_files(&self) -> [PathBuf; 2] {
        ["config", "user"].map(|name| self.place.path().join(name))
    }

    /// The directory of the programs in its PATH.
    pub fn programs(&self) -> PathBuf {
        self.place.path().join("bin")
    }

    /// This path of the host, as this machine reaches it.
    pub fn path(&self, path: &str) -> PathBuf {
        PathBuf::from(format!("/proc/{}/root{path}", self.sshd.0.id()))
    }

    /// Words that run a program on this host; the program and its arguments follow.
    pub fn prefix(&self) -> Vec<String> {
        let pid = self.sshd.0.id().to_string();
        ["/usr/bin/nsenter", "--target", &pid, "--mount", "--net", "--"].map(str::to_owned).into()
    }

    /// The towline on this host that is driven from another one: one runs at a time.
    pub fn agent(&self) -> Option<u32> {
        let is_agent = |pid: &u32| {
            let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            // The writer of a QEMU's log is a child of the one that started it.
            let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
            line.ends_with(b"towline\0agent\0") && name.trim() == "towline"
        };
        self.network.processes().ok()?.into_iter().find(is_agent)
    }

    /// The monitor of a guest that towline runs there.
    pub fn monitor(&self, guest: &str, within: Duration) -> Result<Qmp> {
        Qmp::connect(&self.path(&format!("/run/towline/guests/{guest}/qmp.sock")), within)
    }

    /// Names of the guests that towline runs there.
    pub fn guests(&self) -> Result<Vec<String>> {
        let mut command = process::command_after(&self.prefix());
        let output = command.arg(towline_binary()?).args(["ps", "--quiet"]).output()?;
        ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        Ok(String::from_utf8(output.stdout)?.lines().map(str::to_owned).collect())
    }
}

impl Drop for SshHost {
    fn drop(&mut self) {
        let _ = self.sshd.kill();
        // Guests, also those that wait for a page, and sessions of a client that was cut off outlive it.
        for pid in self.network.processes().unwrap_or_default() {
            process::kill(pid);
        }
    }
}
