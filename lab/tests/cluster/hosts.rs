//! Three hosts with Pacemaker, Corosync and sshd, on this machine.
//!
//! ```text
//!   a host: network, mounts, name, IPC, processes (namespaces); its power switch is the `cgroup.kill` of its control group
//!   shared storage: the directory of the test       links: a bridge in a network of its own
//! ```
//! The packages are not installed: they are laid over `/usr` and `/etc` of each host.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use towline_lab::expect::Scratch;
use towline_lab::{
    Network, Sshd, Towline, command_after, paths, require_lab, skip, ssh_key, towline_binary, wait_until,
};

use crate::bridges::set_apart;

/// Generous: two busy processors.
pub(crate) const WITHIN: Duration = Duration::from_secs(120);
pub(crate) const NODES: [usize; 3] = [1, 2, 3];
const NET: &str = "10.213.79";
/// Users of pacemaker and sshd, which this machine need not have.
const USERS: &str = "hacluster:x:65531:65531::/var/lib/pacemaker:/usr/sbin/nologin\nsshd:x:65533:65534::/run/sshd:/usr/sbin/nologin\n";
const GROUPS: &str = "haclient:x:65531:\n";

/// Three hosts.
pub(crate) struct Cluster {
    pub(crate) place: Scratch,
    packages: PathBuf,
    sshd: Sshd,
    networks: Vec<Network>,
    switch: Network,
    groups: ControlGroups,
    children: Vec<Option<Child>>,
}

/// Software of a host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Membership {
    /// Corosync and Pacemaker.
    Managed,
    /// Neither: the test is the cluster.
    Alone,
}

/// Control groups of the hosts, which are removed with everything in them.
struct ControlGroups(PathBuf);

impl ControlGroups {
    /// Makes them for the test with this directory, or says why not.
    fn new(place: &Path) -> Result<Self, String> {
        let mounts = fs::read_to_string("/proc/self/mounts").map_err(|error| error.to_string())?;
        let mount = mounts.lines().find_map(|line| {
            let mut words = line.split(' ').skip(1);
            let (path, kind) = (words.next()?, words.next()?);
            (kind == "cgroup2").then(|| PathBuf::from(path))
        });
        let root = mount.ok_or("no cgroup v2 is mounted")?;
        let groups = Self(root.join(place.file_name().unwrap()));
        for node in NODES {
            let path = groups.of(node);
            fs::create_dir_all(&path).map_err(|error| format!("{}: {error}", path.display()))?;
            if !path.join("cgroup.kill").exists() {
                return Err("control groups have no cgroup.kill (Linux 5.14)".into());
            }
        }
        Ok(groups)
    }

    fn of(&self, node: usize) -> PathBuf {
        self.0.join(format!("node{node}"))
    }

    fn is_populated(&self, node: usize) -> bool {
        let events = fs::read_to_string(self.of(node).join("cgroup.events"));
        events.is_ok_and(|events| events.contains("populated 1"))
    }

    fn kill(&self, node: usize) {
        let _ = fs::write(self.of(node).join("cgroup.kill"), "1");
    }
}

impl Drop for ControlGroups {
    fn drop(&mut self) {
        for node in NODES {
            self.kill(node);
            let end = Instant::now() + WITHIN;
            while self.is_populated(node) && Instant::now() < end {
                std::thread::sleep(Duration::from_millis(5));
            }
            let _ = fs::remove_dir(self.of(node));
        }
        let _ = fs::remove_dir(&self.0);
    }
}

/// The packages, or the skip of the test.
fn packages(test: &str) -> Option<PathBuf> {
    let packages = paths::lab_directory().join("cluster");
    if !packages.is_dir() {
        skip(test, &format!("{} is missing; run `cargo xtask setup`", packages.display()));
        return None;
    }
    let overlay = format!("mount -t overlay -o ro,lowerdir={}/usr:/usr overlay /usr", packages.display());
    let tried = Command::new("unshare").args(["--mount", "--pid", "--fork", "sh", "-c", &overlay]).output();
    let tried =
        tried.map(|tried| (tried.status.success(), String::from_utf8_lossy(&tried.stderr).into_owned()));
    match tried {
        Ok((true, _)) => Some(packages),
        Ok((false, text)) => {
            skip(test, &format!("no overlay of /usr can be mounted in a namespace here: {}", text.trim()));
            None
        }
        Err(error) => {
            skip(test, &format!("unshare: {error}"));
            None
        }
    }
}

fn networks() -> anyhow::Result<(Network, Vec<Network>)> {
    let switch = Network::new()?;
    switch.run(&["ip", "link", "add", "bridge", "type", "bridge"])?;
    switch.run(&["ip", "link", "set", "bridge", "up"])?;
    let mut networks = Vec::new();
    for node in NODES {
        let network = Network::new()?;
        switch.connect(&format!("port{node}"), &network, "link0")?;
        switch.run(&["ip", "link", "set", &format!("port{node}"), "master", "bridge"])?;
        network.run(&["ip", "address", "add", &format!("{NET}.{node}/24"), "dev", "link0"])?;
        networks.push(network);
    }
    Ok((switch, networks))
}

impl Cluster {
    /// Makes the hosts, which are off; `None`: the test is skipped.
    pub(crate) fn new(test: &str) -> Option<Self> {
        if !require_lab(test) {
            return None;
        }
        let (sshd, packages) = (Sshd::find(test)?, packages(test)?);
        let place = Scratch::new();
        let made = networks().map_err(|error| format!("no networks can be made here: {error:#}"));
        let made = made.and_then(|networks| Ok((networks, ControlGroups::new(&place.path(""))?)));
        let ((switch, networks), groups) = match made {
            Ok(made) => made,
            Err(reason) => {
                skip(test, &reason);
                return None;
            }
        };
        let children = NODES.map(|_| None).into();
        let cluster = Self { place, packages, sshd, networks, switch, groups, children };
        cluster.write_files();
        fs::write(cluster.place.path("cib.xml"), "").unwrap();
        fs::create_dir(cluster.place.path("state")).unwrap();
        Some(cluster)
    }

    fn write_files(&self) {
        let path = |name: &str| self.place.path(name);
        let system = |name: &str| fs::read_to_string(name).unwrap();
        let hosts = NODES.map(|node| format!("{NET}.{node} node{node}\n")).concat();
        fs::write(path("hosts"), system("/etc/hosts") + &hosts).unwrap();
        fs::write(path("passwd"), system("/etc/passwd") + USERS).unwrap();
        fs::write(path("group"), system("/etc/group") + GROUPS).unwrap();
        let node = |node: usize| {
            format!(
                "  node {{\n    ring0_addr: {NET}.{node}\n    name: node{node}\n    nodeid: {node}\n  }}\n"
            )
        };
        let corosync = format!(
            "totem {{\n  version: 2\n  cluster_name: lab\n  transport: knet\n  token: 1000\n  token_coefficient: 0\n  consensus: 1200\n}}\n\
             nodelist {{\n{}}}\nquorum {{\n  provider: corosync_votequorum\n}}\n\
             logging {{\n  to_stderr: yes\n  to_logfile: no\n  to_syslog: no\n  timestamp: hires\n}}\n",
            NODES.map(node).concat()
        );
        fs::write(path("corosync.conf"), corosync).unwrap();
        self.write_programs();
        self.write_ssh();
        for node in NODES {
            fs::create_dir(path(&format!("node{node}"))).unwrap();
        }
    }

    /// Programs of the hosts beside those of the packages.
    fn write_programs(&self) {
        let script = |name: &str, text: &str| {
            let path = self.place.path(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(&path, text).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        };
        for (agent, text) in [
            ("guest", include_str!("../../../packaging/pacemaker/guest")),
            ("protected", include_str!("../../../packaging/pacemaker/protected")),
        ] {
            script(&format!("usr/lib/ocf/resource.d/towline/{agent}"), text);
        }
        let agent = include_str!("fence_lab.sh").replace("@GROUPS@", &self.groups.0.display().to_string());
        script(
            "usr/sbin/fence_lab",
            &agent.replace("@LOG@", &self.place.path("fenced").display().to_string()),
        );
        fs::create_dir_all(self.place.path("usr/bin")).unwrap();
        std::os::unix::fs::symlink(towline_binary().unwrap(), self.place.path("usr/bin/towline")).unwrap();
        fs::write(self.place.path("host.sh"), include_str!("host.sh")).unwrap();
    }

    fn write_ssh(&self) {
        let place = self.place.path("");
        ssh_key(&place, "host").unwrap();
        fs::write(self.place.path("authorized"), ssh_key(&place, "user").unwrap()).unwrap();
        let here = place.display();
        let here = here.to_string();
        let here = here.trim_end_matches('/');
        let started = self.sshd.started().into_iter();
        let started: String =
            started.map(|(program, option)| format!("{option} {}\n", program.display())).collect();
        for node in NODES {
            let config = format!(
                "ListenAddress {NET}.{node}\nHostKey {here}/host\nAuthorizedKeysFile {here}/authorized\nPidFile none\nUsePAM no\n\
                 StrictModes no\nUseDNS no\nPermitRootLogin prohibit-password\nSetEnv PATH=/usr/sbin:/usr/bin:/sbin:/bin\n{started}"
            );
            fs::write(self.place.path(&format!("sshd_config.{node}")), config).unwrap();
        }
        let client = format!(
            "Host *\n  User root\n  IdentityFile {here}/user\n  IdentitiesOnly yes\n  BatchMode yes\n  UserKnownHostsFile /dev/null\n  \
             StrictHostKeyChecking no\n  LogLevel ERROR\n"
        );
        fs::write(self.place.path("ssh_config"), client).unwrap();
    }

    /// OpenSSH's client for these hosts.
    pub(crate) fn ssh(&self) -> String {
        format!("ssh -F {}", self.place.path("ssh_config").display())
    }

    /// Turns a host on, as a member of the cluster or alone.
    pub(crate) fn boot(&mut self, node: usize, membership: Membership) {
        let booted = self.place.path(&format!("node{node}/booted"));
        let _ = fs::remove_file(&booted);
        self.set_link(node, "up");
        let enter = format!("echo $$ > {}/cgroup.procs && exec \"$@\"", self.groups.of(node).display());
        let prefix = self.networks[node - 1].prefix();
        let mut command = Command::new("sh");
        // A host does not outlive the test.
        command.args(["-c", &enter, "sh", "setpriv", "--pdeathsig", "KILL"]).args(prefix);
        command.args(["unshare", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child=KILL", "sh"]);
        command.arg(self.place.path("host.sh")).arg(node.to_string());
        let place = self.place.path("");
        command.arg(place.to_str().unwrap().trim_end_matches('/'));
        command.args([&self.packages, self.sshd.path()]);
        command.args((membership == Membership::Managed).then_some("managed"));
        let log = fs::File::create(self.place.path(&format!("host.{node}.log"))).unwrap();
        command.stdin(Stdio::null()).stdout(log.try_clone().unwrap()).stderr(log);
        if let Some(mut before) = self.children[node - 1].take() {
            let _ = before.wait();
        }
        self.children[node - 1] = Some(command.spawn().unwrap());
        wait_until("a host", WITHIN, || Ok(booted.exists().then_some(()))).unwrap_or_else(|error| {
            let log = fs::read_to_string(self.place.path(&format!("host.{node}.log")));
            panic!("{error:#}: {}", log.unwrap_or_default())
        });
    }

    /// Turns a host off, with everything in it.
    pub(crate) fn kill(&self, node: usize) {
        self.groups.kill(node);
    }

    /// Bytes that a host has sent.
    pub(crate) fn sent(&self, node: usize) -> u64 {
        self.networks[node - 1].sent_bytes("link0").unwrap()
    }

    /// Has all processes of a host stand, or go on.
    pub(crate) fn freeze(&self, node: usize, freezes: bool) {
        fs::write(self.groups.of(node).join("cgroup.freeze"), if freezes { "1" } else { "0" }).unwrap();
    }

    /// Cuts a host's link.
    pub(crate) fn cut(&self, node: usize) {
        self.set_link(node, "down");
    }

    /// Mends it.
    pub(crate) fn mend(&self, node: usize) {
        self.set_link(node, "up");
    }

    /// Has two hosts lose what they send to each other, or mends that. Others reach both.
    pub(crate) fn part(&self, nodes: [usize; 2], are_apart: bool) {
        let [a, b] = nodes;
        set_apart(self.network(a), &format!("{NET}.{b}"), are_apart);
        set_apart(self.network(b), &format!("{NET}.{a}"), are_apart);
    }

    fn set_link(&self, node: usize, state: &str) {
        self.switch.run(&["ip", "link", "set", &format!("port{node}"), state]).unwrap();
    }

    /// Returns true while a process of the host lives.
    pub(crate) fn is_on(&self, node: usize) -> bool {
        self.groups.is_populated(node)
    }

    /// Processes of a host with such a name and command line, by their ids here.
    pub(crate) fn processes(&self, node: usize, is_it: impl Fn(&str, &str) -> bool) -> Vec<u32> {
        let processes = fs::read_to_string(self.groups.of(node).join("cgroup.procs")).unwrap_or_default();
        let read =
            |pid: &u32, file: &str| fs::read_to_string(format!("/proc/{pid}/{file}")).unwrap_or_default();
        let is_it = |pid: &u32| is_it(read(pid, "comm").trim(), &read(pid, "cmdline"));
        processes.lines().filter_map(|pid| pid.parse().ok()).filter(is_it).collect()
    }

    /// The host's first process, by its id here.
    fn first_process(&self, node: usize) -> Option<String> {
        let processes = fs::read_to_string(self.groups.of(node).join("cgroup.procs")).ok()?;
        let is_first = |pid: &&str| {
            let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
            let ids = status.lines().find_map(|line| line.strip_prefix("NSpid:"));
            ids.and_then(|ids| ids.split_whitespace().last()) == Some("1")
        };
        processes.lines().find(is_first).map(str::to_owned)
    }

    /// Words after which a command runs on a host.
    fn prefix(&self, node: usize) -> Vec<String> {
        let pid = self.first_process(node).unwrap_or_else(|| panic!("node{node} is off"));
        // What is started there is fenced with it.
        let enter = format!("echo $$ > {}/cgroup.procs && exec \"$@\"", self.groups.of(node).display());
        let enter = ["sh", "-c", &enter, "sh", "nsenter", "-t", &pid, "-m", "-u", "-i", "-n", "-p", "--"];
        let clean = ["env", "-i", "PATH=/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/root", "LANG=C.UTF-8"];
        [&enter[..], &clean].concat().into_iter().map(str::to_owned).collect()
    }

    /// A command on a host.
    pub(crate) fn on(&self, node: usize, words: &[&str]) -> Command {
        let mut command = command_after(&self.prefix(node));
        command.args(words).stdin(Stdio::null());
        command
    }

    /// Starts towline on a host.
    pub(crate) fn start(&self, node: usize, words: &[&str]) -> Towline {
        Towline::start_after(&self.prefix(node), words).unwrap()
    }

    pub(crate) fn network(&self, node: usize) -> &Network {
        &self.networks[node - 1]
    }

    /// Standard output of a command on a host, which must succeed.
    pub(crate) fn run(&self, node: usize, words: &[&str]) -> String {
        let output = self.on(node, words).output().unwrap();
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{words:?} on node{node}: {} {text}", output.status);
        String::from_utf8(output.stdout).unwrap()
    }

    /// A host that is on.
    pub(crate) fn any(&self) -> usize {
        NODES.into_iter().find(|&node| self.first_process(node).is_some()).unwrap()
    }

    /// This path of a host, as this machine reaches it.
    pub(crate) fn path(&self, node: usize, path: &str) -> PathBuf {
        PathBuf::from(format!("/proc/{}/root{path}", self.first_process(node).unwrap()))
    }

    /// Hosts that were fenced, with the one that did it.
    pub(crate) fn fenced(&self) -> Vec<String> {
        let log = fs::read_to_string(self.place.path("fenced")).unwrap_or_default();
        log.lines().map(str::to_owned).collect()
    }

    /// Lines that the agents of all hosts have written, with this text.
    pub(crate) fn agents_wrote(&self, text: &str) -> Vec<String> {
        let logs = NODES.map(|node| fs::read_to_string(self.place.path(&format!("pacemaker.{node}.log"))));
        let lines = logs.iter().flatten().flat_map(|log| log.lines());
        lines.filter(|line| line.contains(text)).map(str::to_owned).collect()
    }

    pub(crate) fn shared(&self, name: &str) -> PathBuf {
        self.place.path(name)
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        if std::thread::panicking() {
            show(&self.place.path(""));
        }
        for node in NODES {
            self.kill(node);
        }
        for child in self.children.iter_mut().flatten() {
            let _ = child.wait();
        }
    }
}

/// Prints the ends of the logs of a test that fails.
fn show(place: &Path) {
    for node in NODES {
        let log = fs::read_to_string(place.join(format!("pacemaker.{node}.log"))).unwrap_or_default();
        let is_shown = |line: &&str| {
            ["error output", "log_finished", "pcmk__log_transition", "Actions:", "is off", "error:"]
                .iter()
                .any(|word| line.contains(word))
        };
        let lines: Vec<_> = log.lines().filter(is_shown).collect();
        eprintln!("node{node}:\n{}", lines[lines.len().saturating_sub(80)..].join("\n"));
    }
}
