//! A real systemd starts the card, keeps its record, and restarts it after it has died.
//!
//! ```text
//!   this test ── unshare (mounts, processes) ── sh ── systemd --user ── towline net --state fd-store
//! ```
//! It is a separate instance, with its own `/run` and control groups, and ends with the test.

use std::fs;
use std::path::{Path, PathBuf};

use tempfile::TempDir;
use towline_lab::{Network, Towline, Version, require_lab, skip, towline_binary, wait_until};

use crate::support::{
    EchoClient, GUEST, WITHIN, add_tap, boot, builder, guest_address, host_echo, network, number, path,
    scratch,
};

const SYSTEMD: &str = "/lib/systemd/systemd";
/// Possible paths of control groups: version 1's hierarchy of systemd's own with version 2 beside it, or
/// version 2.
const HIERARCHIES: [&str; 3] = ["/sys/fs/cgroup/systemd", "/sys/fs/cgroup/unified", "/sys/fs/cgroup"];

/// A systemd, and its control groups.
struct Manager {
    process: Towline,
    groups: Vec<PathBuf>,
}

impl Manager {
    /// Starts it with one unit, `card.service`, which it starts.
    fn start(network: &Network, home: &TempDir, unit: &str) -> Self {
        let units = home.path().join("systemd/user");
        fs::create_dir_all(&units).unwrap();
        fs::write(units.join("card.service"), unit).unwrap();
        let name = home.path().file_name().unwrap();
        let groups = HIERARCHIES.iter().map(Path::new).filter(|at| at.join("cgroup.procs").exists());
        let groups: Vec<PathBuf> = groups.map(|at| at.join(name)).collect();
        groups.iter().for_each(|group| fs::create_dir(group).unwrap());
        let joins: String =
            groups.iter().map(|group| format!("echo $$ > {}/cgroup.procs; ", group.display())).collect();
        let home = home.path().display();
        let script = format!(
            "set -e; {joins} mount -t tmpfs none /run; mkdir -p /run/systemd/system /run/user/0; \
             env -i HOME={home} XDG_CONFIG_HOME={home} XDG_RUNTIME_DIR=/run/user/0 PATH=/usr/bin:/bin \
             {SYSTEMD} --user --unit=card.service"
        );
        let apart = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c"];
        let prefix = network.prefix();
        let line = prefix[1..].iter().map(String::as_str).chain(apart).chain([script.as_str()]);
        Self { process: Towline::start(Path::new(&prefix[0]), line).unwrap(), groups }
    }

    /// Process ID of the card, once it differs from `before`.
    fn card(&mut self, socket: &Path, before: Option<u32>) -> u32 {
        let found = wait_until("the card's process", WITHIN, || {
            assert!(self.process.runs()?, "systemd ended: {}", self.process.stderr());
            Ok(process_with(socket).filter(|pid| Some(*pid) != before))
        });
        found.unwrap()
    }
}

impl Drop for Manager {
    fn drop(&mut self) {
        // All processes that it started exit with the shell, the first process of their namespace.
        let _ = self.process.kill();
        for group in &self.groups {
            let empty = || Ok(remove_groups(group).is_ok().then_some(()));
            let removed = wait_until("an empty control group", WITHIN, empty);
            assert!(removed.is_ok() || std::thread::panicking(), "{removed:?}");
        }
    }
}

/// Removes the innermost first, as the kernel requires.
fn remove_groups(group: &Path) -> std::io::Result<()> {
    for entry in fs::read_dir(group)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            remove_groups(&entry.path())?;
        }
    }
    fs::remove_dir(group)
}

/// Process ID of the towline that has this word in its command line.
fn process_with(word: &Path) -> Option<u32> {
    let word = word.to_str().unwrap();
    fs::read_dir("/proc").unwrap().flatten().find_map(|entry| {
        let pid = entry.file_name().to_str()?.parse().ok()?;
        let line = fs::read_to_string(entry.path().join("cmdline")).ok()?;
        let mut words = line.split('\0');
        (words.next()?.ends_with("towline") && words.any(|other| other == word)).then_some(pid)
    })
}

#[test]
fn a_real_systemd_keeps_the_record() {
    let name = "a_real_systemd_keeps_the_record";
    if !require_lab(name) {
        return;
    }
    if !Path::new(SYSTEMD).exists() {
        return skip(name, "no systemd on this machine");
    }
    let Some(network) = network(name) else { return };
    add_tap(&network, 2);
    let (home, scratch) = (scratch(), scratch());
    let socket = path(&scratch, "net.sock");
    // A binary with another name would not be found.
    let towline = path(&scratch, "towline");
    std::os::unix::fs::symlink(towline_binary().unwrap().canonicalize().unwrap(), &towline).unwrap();
    let unit = format!(
        "[Unit]\nDefaultDependencies=no\nStartLimitIntervalSec=0\n[Service]\nType=exec\nNotifyAccess=main\n\
         FileDescriptorStoreMax=1\nRestart=always\nRestartSec=0\nStandardError=append:{}\n\
         ExecStart={} net --socket {} --tap tap0 --queues 2 --state fd-store\n",
        path(&scratch, "errors").display(),
        towline.display(),
        socket.display()
    );
    let mut manager = Manager::start(&network, &home, &unit);
    let mut card = manager.card(&socket, None);
    let (_qemu, mut guest) = boot(&builder(Version::V10_0, &socket, 2));
    let clients: Vec<_> = (0..3).map(|_| EchoClient::begin(&network, guest_address(GUEST))).collect();
    clients.iter().for_each(|client| client.wait_blocks(5));
    for _ in 0..number("TOWLINE_SOAK_NET_RESTARTS", 2) {
        towline_lab::signal(card, rustix::process::Signal::KILL);
        card = manager.card(&socket, Some(card));
        let given = fs::read_to_string(format!("/proc/{card}/environ")).unwrap();
        assert!(given.contains("LISTEN_FDS=1\0"), "systemd gives it back what it was given: {given}");
        clients.iter().for_each(|client| client.wait_blocks(5));
    }
    let longest = clients.into_iter().map(EchoClient::end).max().unwrap();
    // Through all buffers of the rings: a lost descriptor would be missing by now.
    guest.talk(host_echo(&network), 2 << 20, 1).unwrap();
    let errors = fs::read_to_string(path(&scratch, "errors")).unwrap();
    assert!(!errors.contains("ERROR"), "{errors}");
    println!("the longest block took {longest:?}");
}
