//! What a copy needs of its host, by its ends.

use std::net::IpAddr;
use std::path::{Path, PathBuf};

use towline_channel::Address;
use towline_control::journal::RuntimeDirectory;
use towline_control::plan::{Destination, Request, Source};

use super::{Policy, Ports, directory};

/// What is looked at on the way: processors, memory, locks of drives, whether a QEMU that was ended is gone, our own pages.
const LOOKED_AT: [&str; 3] = ["/proc", "/sys/devices/system", "/sys/fs/cgroup"];
/// Where the C library finds out what a name means, and where certificates of others are.
const NAMES: [&str; 7] =
    ["/etc", "/usr", "/lib", "/lib64", "/run/systemd/resolve", "/run/resolvconf", "/run/NetworkManager"];
/// Variables that name a file which store or TLS read, and those below the home directory.
#[cfg(feature = "store")]
const CREDENTIALS: [&str; 7] = [
    "AWS_SHARED_CREDENTIALS_FILE",
    "AWS_CONFIG_FILE",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE",
    "GOOGLE_APPLICATION_CREDENTIALS",
    "SSL_CERT_FILE",
    "SSL_CERT_DIR",
];
#[cfg(feature = "store")]
const OF_USER: [&str; 3] = [".aws", ".config/gcloud", ".azure"];
/// Where pages wait for a store without TMPDIR.
#[cfg(feature = "store")]
const SPOOL: &str = "/var/tmp";

/// Why a copy to or from `exec:` is not confined.
pub(crate) const COMMANDS: &str = "exec: runs commands, which would be confined with this process";

/// What a copy needs whose ends these are, with all that its options name; `None`: it cannot be confined, as it runs commands
/// (`exec:`), of which nobody knows what they need.
pub(crate) fn of_copy(
    source: &Source,
    destinations: &[Destination],
    options: &Request,
    control: Option<&Path>,
) -> Option<Policy> {
    let mut policy = Policy { connects_unix: true, opens: true, ..Policy::default() };
    policy.read.extend(LOOKED_AT.map(PathBuf::from));
    // Where a private socket between a QEMU and us is made.
    policy.write.push(std::env::temp_dir());
    if matches!(source, Source::Qmp(_)) || destinations.iter().any(|one| matches!(one, Destination::Qmp(_))) {
        // Where the journals of QEMUs are. If there is no such place, whoever needs it says so.
        policy.write.extend(RuntimeDirectory::open().ok().map(|directory| directory.path().to_owned()));
    }
    policy.source(source)?;
    for destination in destinations {
        policy.destination(destination)?;
    }
    // Whether two of several QEMUs have one drive is seen in what they have open.
    policy.looks_into_others = destinations.len() > 1;
    if is_local(source, destinations) {
        // Lanes between two halves of this process are connections to ourselves, at whatever port is free.
        (policy.bind, policy.connect) = (Ports::Any, Ports::Any);
    }
    if let (Source::Image(path), true) = (source, options.is_postcopy()) {
        // What a guest needed at once is remembered beside its image.
        policy.write.push(directory(path));
    }
    if let Some(base) = options.base() {
        policy.reads_image(base);
    }
    if let Some(tls) = &options.tls {
        policy.reads_all_in(&tls.credentials);
    }
    policy.write.extend(control.map(directory));
    Some(policy)
}

impl Policy {
    fn source(&mut self, source: &Source) -> Option<()> {
        match source {
            Source::Image(path) => self.reads_image(path),
            Source::Stream(address) => self.stream(address, true)?,
            #[cfg(feature = "store")]
            Source::Store(location) => self.store(location),
            Source::Qmp(_) | Source::Memory(_) => {}
        }
        Some(())
    }

    fn destination(&mut self, destination: &Destination) -> Option<()> {
        match destination {
            Destination::Image(path) => self.write.push(directory(path)),
            Destination::Stream(address) => self.stream(address, false)?,
            #[cfg(feature = "store")]
            Destination::Store(location) => self.store(location),
            Destination::Qmp(_) | Destination::Memory(_) | Destination::Null => {}
        }
        Some(())
    }

    /// The image, wherever its name leads, and all that it is based on.
    fn reads_image(&mut self, path: &Path) {
        for path in towline_image::base_paths(path).into_iter().chain([path.to_owned()]) {
            self.read.extend(path.canonicalize().ok().as_deref().map(directory));
            self.read.push(directory(&path));
        }
    }

    /// The files of a directory, wherever their names lead: whoever renews certificates keeps links to the newest.
    fn reads_all_in(&mut self, path: &Path) {
        self.read.push(path.to_owned());
        let entries = std::fs::read_dir(path).into_iter().flatten().flatten();
        self.read.extend(entries.filter_map(|entry| entry.path().canonicalize().ok()));
    }

    fn stream(&mut self, address: &Address, listens: bool) -> Option<()> {
        match address {
            Address::Tcp { host, port } | Address::WebSocket { host, port, .. } => {
                let ports = if listens { &mut self.bind } else { &mut self.connect };
                ports.add(*port);
                if !host.is_empty() && host.parse::<IpAddr>().is_err() {
                    self.resolves();
                }
            }
            Address::Unix(path) => self.write.push(directory(path)),
            Address::Fd(_) => {}
            Address::File { path, .. } => self.write.push(directory(path)),
            Address::Exec(_) => return None,
        }
        Some(())
    }

    fn resolves(&mut self) {
        self.resolves = true;
        self.read.extend(NAMES.map(PathBuf::from));
    }

    #[cfg(feature = "store")]
    fn store(&mut self, location: &towline_image::store::Location) {
        use towline_image::store::Scheme;

        self.write.push(std::env::var_os("TMPDIR").map_or_else(|| SPOOL.into(), PathBuf::from));
        if location.scheme() == Scheme::Directory {
            let shown = location.to_string();
            let path = Path::new(shown.strip_prefix("store:").unwrap_or(&shown));
            // The directory is made if it is not there.
            let there = path.ancestors().skip(1).find(|path| path.is_dir() || path.as_os_str().is_empty());
            self.write.push(match there {
                Some(path) if !path.as_os_str().is_empty() => path.to_owned(),
                _ => PathBuf::from("."),
            });
            return;
        }
        self.resolves();
        self.connect = Ports::Any;
        self.read.extend(CREDENTIALS.iter().filter_map(std::env::var_os).map(PathBuf::from));
        let home = std::env::var_os("HOME").map(PathBuf::from);
        self.read.extend(home.iter().flat_map(|home| OF_USER.map(|name| home.join(name))));
    }
}

/// Whether both halves may be of this process: neither a stream nor a QEMU at one end.
fn is_local(source: &Source, destinations: &[Destination]) -> bool {
    let is_far =
        |destination: &Destination| matches!(destination, Destination::Stream(_) | Destination::Qmp(_));
    !matches!(source, Source::Stream(_) | Source::Qmp(_)) && !destinations.iter().all(is_far)
}
