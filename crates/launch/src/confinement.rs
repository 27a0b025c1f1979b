//! Confinement of a process, read from `/proc`: to give it to another process, and to verify that the other
//! one has it.
//!
//! ```text
//!   /proc/PID/{status,stat,limits,cgroup,oom_score_adj} ─► Confinement ─► Given ─► the child, between `fork` and `execve`
//!                                                              └─ differences from that of the child, once it has started
//! ```
//! Giving it is an attempt: the comparison decides. Landlock and securebits are in no file of `/proc`, and
//! not compared.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use rustix::fs::Mode;
use rustix::process::{Gid, Resource, Rlimit, setpriority_process, setrlimit, umask};
use rustix::thread::{
    CapabilitySet, CapabilitySets, CpuSet, capabilities, configure_capability_in_ambient_set,
    remove_capability_from_bounding_set, sched_setaffinity, set_capabilities, set_no_new_privs,
    set_thread_groups, set_thread_res_gid,
};

/// Lines of `/proc/PID/status`.
const STATUS: [&str; 14] = [
    "Uid",
    "Gid",
    "Groups",
    "CapInh",
    "CapPrm",
    "CapEff",
    "CapBnd",
    "CapAmb",
    "NoNewPrivs",
    "Seccomp",
    "Seccomp_filters",
    "Umask",
    "Cpus_allowed_list",
    "Mems_allowed_list",
];
/// Names of limits in `/proc/PID/limits`, in columns of this width.
const LIMIT_NAME_BYTES: usize = 26;
const LIMITS: [(&str, Resource); 16] = [
    ("Max cpu time", Resource::Cpu),
    ("Max file size", Resource::Fsize),
    ("Max data size", Resource::Data),
    ("Max stack size", Resource::Stack),
    ("Max core file size", Resource::Core),
    ("Max resident set", Resource::Rss),
    ("Max processes", Resource::Nproc),
    (OPEN_FILES, Resource::Nofile),
    ("Max locked memory", Resource::Memlock),
    ("Max address space", Resource::As),
    ("Max file locks", Resource::Locks),
    ("Max pending signals", Resource::Sigpending),
    ("Max msgqueue size", Resource::Msgqueue),
    ("Max nice priority", Resource::Nice),
    ("Max realtime priority", Resource::Rtprio),
    ("Max realtime timeout", Resource::Rttime),
];
/// QEMU 9 and later raise the soft limit of open files to the hard one.
const OPEN_FILES: &str = "Max open files";
const NAMESPACES: [&str; 8] = ["cgroup", "ipc", "mnt", "net", "pid", "time", "user", "uts"];
const CGROUP: &str = "control group";
const NICE: &str = "nice";
const OOM: &str = "oom_score_adj";
/// Where hierarchies of control groups are mounted.
const CGROUPS: &str = "/sys/fs/cgroup";
/// Processors that a set can name.
const CPUS_MAX: usize = 1024;

/// See the module's text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Confinement {
    properties: BTreeMap<String, String>,
}

/// The part of it that a child can be given; made before the `fork`, since the child may not allocate.
#[derive(Debug)]
pub(crate) struct Given {
    cgroups: Vec<File>,
    oom: String,
    limits: Vec<(Resource, Rlimit)>,
    nice: Option<i32>,
    cpus: Option<CpuSet>,
    umask: Option<Mode>,
    groups: Vec<Gid>,
    gids: Vec<Gid>,
    inheritable: CapabilitySet,
    bounding: CapabilitySet,
    ambient: CapabilitySet,
    no_new_privs: bool,
}

impl Confinement {
    /// Confinement of a process.
    ///
    /// # Errors
    /// The files of the process in `/proc` cannot be read.
    pub fn of(pid: u32) -> io::Result<Self> {
        let own = PathBuf::from(format!("/proc/{pid}"));
        let read = |name: &str| fs::read_to_string(own.join(name));
        let status = read("status")?;
        let mut properties = BTreeMap::new();
        let mut add = |name: &str, value: &str| properties.insert(name.to_owned(), value.to_owned());
        for name in STATUS {
            if let Some(value) = field(&status, name) {
                add(name, &words(value));
            }
        }
        let stat = read("stat")?;
        // Fields 19, 40 and 41, counted after the name, which may have any characters.
        let fields: Vec<&str> = stat.rsplit_once(") ").map_or("", |(_, rest)| rest).split(' ').collect();
        let number = |at: usize| fields.get(at - 3).copied().unwrap_or_default();
        add(NICE, number(19));
        add("scheduling policy", &format!("{} priority {}", number(41), number(40)));
        for line in read("limits")?.lines().skip(1) {
            let Some((name, rest)) = line.split_at_checked(LIMIT_NAME_BYTES) else { continue };
            let values: Vec<&str> = rest.split_whitespace().take(2).collect();
            add(name.trim(), &values.join(" "));
        }
        add(CGROUP, &words(&read("cgroup")?));
        add(OOM, read(OOM)?.trim());
        // Without a security module there is no label.
        add("security label", read("attr/current").unwrap_or_default().trim_end_matches(['\0', '\n']));
        for name in NAMESPACES {
            if let Ok(namespace) = fs::read_link(own.join("ns").join(name)) {
                add(&format!("{name} namespace"), &namespace.to_string_lossy());
            }
        }
        let root = fs::metadata(own.join("root"))?;
        add("root directory", &format!("{}:{}", root.dev(), root.ino()));
        add("threads with other processors", &threads(&own, &status)?);
        Ok(Self { properties })
    }

    /// Differences of another process, each with both values.
    pub fn differences(&self, other: &Self) -> Vec<String> {
        let names: BTreeSet<&String> = self.properties.keys().chain(other.properties.keys()).collect();
        let value = |of: &Self, name: &String| {
            let value = of.properties.get(name).cloned().unwrap_or_default();
            if name == OPEN_FILES {
                value.split(' ').next_back().unwrap_or_default().to_owned()
            } else {
                value
            }
        };
        let difference = |name: &String| {
            let (old, new) = (value(self, name), value(other, name));
            (old != new).then(|| format!("{name}: {old:?} in the old QEMU, {new:?} in the new one"))
        };
        names.into_iter().filter_map(difference).collect()
    }

    /// Effective user of the process, if known.
    pub fn user(&self) -> Option<u32> {
        self.value("Uid").split(' ').nth(1)?.parse().ok()
    }

    fn value(&self, name: &str) -> &str {
        self.properties.get(name).map_or("", String::as_str)
    }

    /// The part of it that a child of this process can be given.
    pub(crate) fn give(&self) -> Given {
        let numbers = |name: &str| -> Vec<u32> {
            self.value(name).split(' ').filter_map(|number| number.parse().ok()).collect()
        };
        let gids = |name: &str| numbers(name).into_iter().map(Gid::from_raw).collect::<Vec<_>>();
        let set = |name: &str| {
            CapabilitySet::from_bits_retain(u64::from_str_radix(self.value(name), 16).unwrap_or(u64::MAX))
        };
        let limit = |(name, resource): &(&str, Resource)| {
            let (current, maximum) = self.value(name).split_once(' ')?;
            Some((*resource, Rlimit { current: current.parse().ok(), maximum: maximum.parse().ok() }))
        };
        let own = Self::of(std::process::id());
        let own_cgroup = own.as_ref().map_or("", |own| own.value(CGROUP));
        let open = |path: &Path| OpenOptions::new().write(true).open(path).ok();
        Given {
            cgroups: cgroups(self.value(CGROUP), own_cgroup).iter().filter_map(|path| open(path)).collect(),
            oom: self.value(OOM).to_owned(),
            limits: LIMITS.iter().filter_map(limit).collect(),
            nice: self.value(NICE).parse().ok(),
            cpus: cpus(self.value("Cpus_allowed_list")),
            umask: u32::from_str_radix(self.value("Umask"), 8).ok().map(Mode::from_raw_mode),
            groups: gids("Groups"),
            gids: gids("Gid"),
            inheritable: set("CapInh"),
            bounding: set("CapBnd"),
            ambient: set("CapAmb"),
            no_new_privs: self.value("NoNewPrivs") == "1",
        }
    }
}

impl Given {
    /// Confines the calling process in this way, where it is permitted. Called between `fork` and `execve`:
    /// it makes system calls, and allocates nothing.
    pub(crate) fn apply(&self) {
        for group in &self.cgroups {
            let _ = rustix::io::write(group, b"0");
        }
        let flags = rustix::fs::OFlags::WRONLY;
        if let Ok(file) = rustix::fs::open(c"/proc/self/oom_score_adj", flags, Mode::empty()) {
            let _ = rustix::io::write(file, self.oom.as_bytes());
        }
        for (resource, limit) in &self.limits {
            let _ = setrlimit(*resource, *limit);
        }
        let _ = self.nice.map(|nice| setpriority_process(None, nice));
        let _ = self.cpus.as_ref().map(|cpus| sched_setaffinity(None, cpus));
        let _ = self.umask.map(umask);
        let _ = set_thread_groups(&self.groups);
        if let [real, effective, saved, ..] = self.gids[..] {
            let _ = set_thread_res_gid(real, effective, saved);
        }
        for capability in CapabilitySet::all().iter() {
            if !self.bounding.contains(capability) {
                let _ = remove_capability_from_bounding_set(capability);
            }
        }
        if let Ok(own) = capabilities(None) {
            let _ = set_capabilities(None, CapabilitySets { inheritable: self.inheritable, ..own });
        }
        for capability in CapabilitySet::all().iter() {
            let _ = configure_capability_in_ambient_set(capability, self.ambient.contains(capability));
        }
        if self.no_new_privs {
            let _ = set_no_new_privs(true);
        }
    }
}

fn field<'a>(status: &'a str, name: &str) -> Option<&'a str> {
    status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))
}

fn words(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Threads whose processors are not those of their process.
fn threads(own: &Path, status: &str) -> io::Result<String> {
    let of_process = field(status, "Cpus_allowed_list").unwrap_or_default().trim().to_owned();
    let mut found = BTreeSet::new();
    for thread in fs::read_dir(own.join("task"))?.flatten() {
        // It may have ended.
        let Ok(status) = fs::read_to_string(thread.path().join("status")) else { continue };
        let cpus = field(&status, "Cpus_allowed_list").unwrap_or_default().trim();
        if cpus != of_process {
            found.insert(format!("{} on {cpus}", field(&status, "Name").unwrap_or_default().trim()));
        }
    }
    Ok(found.into_iter().collect::<Vec<_>>().join(", "))
}

/// The control groups of a process that this one is not in. That of a service ends with the service's
/// process, and is not joined.
fn cgroups(found: &str, own: &str) -> Vec<PathBuf> {
    let own: Vec<&str> = own.split(' ').collect();
    let is_other = |line: &&str| !own.contains(line) && !line.contains(".service");
    let path = |line: &str| {
        let (_, rest) = line.split_once(':')?;
        let (controllers, group) = rest.split_once(':')?;
        let unified = Path::new(CGROUPS).join("unified");
        let root = match controllers {
            "" if unified.is_dir() => unified,
            "" => PathBuf::from(CGROUPS),
            named => Path::new(CGROUPS).join(named.strip_prefix("name=").unwrap_or(named)),
        };
        Some(root.join(group.trim_start_matches('/')).join("cgroup.procs"))
    };
    found.split(' ').filter(is_other).filter_map(path).collect()
}

/// Parses `0-3,8`.
fn cpus(list: &str) -> Option<CpuSet> {
    let mut set = CpuSet::new();
    for range in list.split(',') {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (first, last) = (usize::from_str(first).ok()?, usize::from_str(last).ok()?);
        (first..=last).filter(|cpu| *cpu < CPUS_MAX).for_each(|cpu| set.set(cpu));
    }
    Some(set)
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn a_process_is_like_itself_and_a_confined_child_is_not() {
        let own = Confinement::of(std::process::id()).unwrap();
        assert_eq!(own.differences(&own), Vec::<String>::new());
        assert_eq!(own.user(), Some(rustix::process::geteuid().as_raw()));
        let mut child = Command::new("sh")
            .args(["-c", "umask 027; ulimit -n 17; ulimit -c 0; exec sleep 60"])
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let found = || Confinement::of(child.id()).is_ok_and(|found| found.value(OPEN_FILES) == "17 17");
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(30);
        while !found() || Confinement::of(child.id()).unwrap().value("Umask") != "0027" {
            assert!(std::time::Instant::now() < deadline);
            std::thread::yield_now();
        }
        let differences = own.differences(&Confinement::of(child.id()).unwrap());
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(differences.iter().any(|found| found.starts_with("Max open files: ")), "{differences:?}");
        assert!(differences.iter().any(|found| found.starts_with("Umask: ")), "{differences:?}");
    }

    #[test]
    fn groups_of_a_service_are_not_joined() {
        let own = "4:memory:/a 0::/user.slice/x.scope";
        let found = "4:memory:/a 3:cpu:/b 1:name=systemd:/s 0::/system.slice/vm.service";
        let paths = cgroups(found, own);
        assert_eq!(
            paths,
            ["/sys/fs/cgroup/cpu/b/cgroup.procs", "/sys/fs/cgroup/systemd/s/cgroup.procs"].map(PathBuf::from)
        );
    }

    #[test]
    fn sets_of_processors_are_parsed() {
        let set = cpus("0-2,5").unwrap();
        let found: Vec<usize> = (0..8).filter(|cpu| set.is_set(*cpu)).collect();
        assert_eq!(found, [0, 1, 2, 5]);
        assert!(cpus("").is_none());
    }
}
