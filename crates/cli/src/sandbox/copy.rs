//! Policy of `copy`, `move` and `inspect`, by their endpoints.

use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use towline_channel::Address;
use towline_control::in_place;
use towline_control::journal::RuntimeDirectory;
use towline_control::plan::{ConnectingEnd, CopyRequest, Destination, Source, Tls, WritableDisks};
use towline_launch::RuntimeRoot;

use super::{AllowedPorts, Policy, parent_directory};

/// Paths read by every copy: processors, memory, locks of drives, processes of QEMUs, the page map of this
/// process.
const SYSTEM: [&str; 3] = ["/proc", "/sys/devices/system", "/sys/fs/cgroup"];
/// Paths that the C library reads to resolve host names, and CA certificates.
const NAME_SERVICE: [&str; 7] =
    ["/etc", "/usr", "/lib", "/lib64", "/run/systemd/resolve", "/run/resolvconf", "/run/NetworkManager"];
/// Variables that name a file read by object stores or TLS.
const CREDENTIALS: [&str; 7] = [
    "AWS_SHARED_CREDENTIALS_FILE",
    "AWS_CONFIG_FILE",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE",
    "GOOGLE_APPLICATION_CREDENTIALS",
    "SSL_CERT_FILE",
    "SSL_CERT_DIR",
];
/// Directories of credentials below the home directory.
const HOME_CREDENTIALS: [&str; 3] = [".aws", ".config/gcloud", ".azure"];
/// Directory of pages that wait for their upload, without `TMPDIR`.
const SPOOL: &str = "/var/tmp";

/// Reason that a copy to or from `exec:` is not confined.
pub(crate) const EXEC_UNCONFINED: &str = "commands of exec: would be confined with this process";

/// Suffix of an image's manifest.
const MANIFEST_SUFFIX: &str = ".manifest.json";

/// Returns the policy of a copy with these endpoints and options, and the control socket `qmp`. `None`: it
/// cannot be confined, since it runs a command (`exec:`), whose needs are unknown.
pub(crate) fn policy_of_copy(
    source: &Source,
    destinations: &[Destination],
    request: &CopyRequest,
    qmp: Option<&Path>,
) -> Option<Policy> {
    let mut policy = Policy { connects_unix: true, opens: true, ..Policy::default() };
    policy.read.extend(SYSTEM.map(PathBuf::from));
    // Private sockets between QEMU and this process.
    policy.write.push(std::env::temp_dir());
    if matches!(source, Source::Qmp(_)) || destinations.iter().any(|one| matches!(one, Destination::Qmp(_))) {
        // Journals of QEMUs. A missing directory is reported where it is used.
        policy.write.extend(RuntimeDirectory::open().ok().map(|directory| directory.path().to_owned()));
        // Which of them have generations.
        policy.read.push(RuntimeRoot::of_user().path().to_owned());
        policy.write.extend(permit_generations());
    }
    let (from, to) = match request.connects {
        ConnectingEnd::Source => (StreamDirection::Listen, StreamDirection::Connect),
        ConnectingEnd::Destination => (StreamDirection::Connect, StreamDirection::Listen),
    };
    permit_source(&mut policy, source, from)?;
    for destination in destinations {
        permit_destination(&mut policy, destination, to)?;
    }
    // Drives that two QEMUs share are found in their open files.
    let is_move = matches!((source, destinations), (Source::Qmp(_), [Destination::Qmp(_)]));
    policy.inspects_processes = is_move || destinations.len() > 1 || may_map(source, destinations, request);
    if is_local(source, destinations) {
        // Lanes within this process are TCP connections by any free port.
        (policy.bind, policy.connect) = (AllowedPorts::Any, AllowedPorts::Any);
    }
    if let (Source::Image(path), true) = (source, request.is_postcopy()) {
        // The working set is stored beside the image.
        policy.write.push(parent_directory(path));
    }
    if let Some(base) = request.base() {
        permit_image(&mut policy, base);
    }
    if let WritableDisks::Mirrored { to, .. } = &request.disks {
        permit_stream(&mut policy, to, StreamDirection::Connect)?;
    }
    if let Some(Tls::Files { credentials, .. }) = &request.tls {
        permit_directory(&mut policy, credentials);
    }
    policy.write.extend(qmp.map(parent_directory));
    Some(policy)
}

/// Directories of generations of this user's guests.
fn permit_generations() -> impl Iterator<Item = PathBuf> {
    let guests = RuntimeRoot::of_user().guests().unwrap_or_default();
    guests.into_iter().flatten().filter_map(|guest| Some(guest.generations?.directory))
}

fn permit_source(policy: &mut Policy, source: &Source, stream: StreamDirection) -> Option<()> {
    match source {
        Source::Image(path) => permit_image(policy, path),
        Source::Stream(address) => permit_stream(policy, address, stream)?,
        Source::Store(location) => permit_store(policy, location),
        Source::Qmp(_) | Source::Process(_) => {}
    }
    Some(())
}

/// Returns the policy of a command on a store or an image in it.
#[cfg(feature = "store")]
pub(crate) fn policy_of_store(location: &towline_image::store::Location) -> Policy {
    let mut policy = Policy { connects_unix: true, opens: true, ..Policy::default() };
    policy.read.extend(SYSTEM.map(PathBuf::from));
    permit_store(&mut policy, location);
    policy
}

/// Returns the policy of a command that reads an image, or all images of a directory, with their bases.
pub(crate) fn policy_of_images(path: &Path) -> Policy {
    let mut policy = Policy { opens: true, ..Policy::default() };
    policy.read.extend(SYSTEM.map(PathBuf::from));
    if !path.is_dir() {
        permit_image(&mut policy, path);
        return policy;
    }
    policy.read.push(path.to_owned());
    for entry in std::fs::read_dir(path).into_iter().flatten().flatten() {
        let manifest = entry.path();
        let image = manifest.to_str().and_then(|manifest| manifest.strip_suffix(MANIFEST_SUFFIX));
        image.iter().for_each(|image| permit_image(&mut policy, Path::new(image)));
    }
    policy
}

fn permit_destination(policy: &mut Policy, destination: &Destination, stream: StreamDirection) -> Option<()> {
    match destination {
        Destination::Image(path) => policy.write.push(parent_directory(path)),
        Destination::Stream(address) => permit_stream(policy, address, stream)?,
        Destination::Store(location) => permit_store(policy, location),
        Destination::Qmp(_) | Destination::Process(_) | Destination::Null => {}
    }
    Some(())
}

/// Permits images that QEMUs map, and from which a running guest differs: it is read in its QEMU if the guest is stored and runs on,
/// compared where the guest arrives in a QEMU, or goes to another towline. `interrupt` ends the wait for a monitor.
pub(crate) fn permit_mapped_images(
    policy: &mut Policy,
    source: &Source,
    destinations: &[Destination],
    request: &CopyRequest,
    interrupt: &Arc<OwnedFd>,
) {
    let is_taken = request.resumes() && destinations.iter().all(Destination::is_image);
    let is_sent = destinations.iter().any(|one| matches!(one, Destination::Stream(_)));
    let from = match source {
        Source::Qmp(socket) if is_taken || is_sent => Some(socket),
        _ => None,
    };
    let into = destinations.iter().filter_map(|one| match one {
        Destination::Qmp(socket) if !source.is_image() => Some(socket),
        _ => None,
    });
    for image in from.into_iter().chain(into).filter_map(|socket| in_place::image_of(socket, interrupt)) {
        permit_image(policy, &image);
        policy.inspects_processes = true;
    }
}

/// Returns true if a destination's QEMU names the image as its memory, which its mappings have to prove.
fn may_map(source: &Source, destinations: &[Destination], request: &CopyRequest) -> bool {
    let Source::Image(image) = source else { return false };
    let may_map =
        |one: &Destination| matches!(one, Destination::Qmp(socket) if in_place::may_map(socket, image));
    !request.stream && destinations.iter().any(may_map)
}

/// Permits an image with its directory, the target of its symbolic link, and its base images. Base images are
/// named by a manifest, which may come from anyone. So only files with a manifest are permitted, and only
/// these two files of each.
pub(crate) fn permit_image(policy: &mut Policy, path: &Path) {
    policy.read.extend(path.canonicalize().ok().as_deref().map(parent_directory));
    policy.read.push(parent_directory(path));
    for base in towline_image::base_paths(path) {
        let manifests =
            ["", ".new"].map(|suffix| PathBuf::from(format!("{}{MANIFEST_SUFFIX}{suffix}", base.display())));
        if manifests.iter().any(|manifest| manifest.is_file()) {
            policy
                .read
                .extend(manifests.into_iter().chain([base]).filter_map(|file| file.canonicalize().ok()));
        }
    }
}

/// Permits the files of a directory and the targets of symbolic links in it, with which certificates are
/// often renewed.
fn permit_directory(policy: &mut Policy, path: &Path) {
    policy.read.push(path.to_owned());
    let entries = std::fs::read_dir(path).into_iter().flatten().flatten();
    policy.read.extend(entries.filter_map(|entry| entry.path().canonicalize().ok()));
}

/// Direction in which a stream is opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum StreamDirection {
    Listen,
    Connect,
}

fn permit_stream(policy: &mut Policy, address: &Address, direction: StreamDirection) -> Option<()> {
    match address {
        Address::Tcp { host, port } | Address::WebSocket { host, port, .. } => {
            match direction {
                StreamDirection::Listen => policy.bind.add(*port),
                StreamDirection::Connect => policy.connect.add(*port),
            }
            if !host.is_empty() && host.parse::<IpAddr>().is_err() {
                permit_name_service(policy);
            }
        }
        Address::Unix(path) => policy.write.push(parent_directory(path)),
        Address::Fd(_) => {}
        Address::File { path, .. } => policy.write.push(parent_directory(path)),
        Address::Exec(_) => return None,
    }
    Some(())
}

fn permit_name_service(policy: &mut Policy) {
    policy.resolves_names = true;
    policy.read.extend(NAME_SERVICE.map(PathBuf::from));
}

fn permit_store(policy: &mut Policy, location: &towline_image::Location) {
    use towline_image::Scheme;

    policy.write.push(std::env::var_os("TMPDIR").map_or_else(|| SPOOL.into(), PathBuf::from));
    if location.scheme() == Scheme::Directory {
        let shown = location.to_string();
        let path = Path::new(shown.strip_prefix("store:").unwrap_or(&shown));
        // A missing directory is created.
        let existing = path.ancestors().skip(1).find(|path| path.is_dir() || path.as_os_str().is_empty());
        policy.write.push(match existing {
            Some(path) if !path.as_os_str().is_empty() => path.to_owned(),
            _ => PathBuf::from("."),
        });
        return;
    }
    permit_name_service(policy);
    policy.connect = AllowedPorts::Any;
    policy.read.extend(CREDENTIALS.iter().filter_map(std::env::var_os).map(PathBuf::from));
    let home = std::env::var_os("HOME").map(PathBuf::from);
    policy.read.extend(home.iter().flat_map(|home| HOME_CREDENTIALS.map(|name| home.join(name))));
}

/// Returns true if both ends of lanes may be in this process: neither a stream nor a QEMU at one end.
fn is_local(source: &Source, destinations: &[Destination]) -> bool {
    let is_remote =
        |destination: &Destination| matches!(destination, Destination::Stream(_) | Destination::Qmp(_));
    !matches!(source, Source::Stream(_) | Source::Qmp(_)) && !destinations.iter().all(is_remote)
}
