//! Overlays: a qcow2 file for each disk that a guest would write to, which receives the writes in the disk's
//! place.
//!
//! ```text
//!   -drive file=/srv/a.raw,format=raw  ─► DIRECTORY/NAME.disk0.qcow2, made by qemu-img with /srv/a.raw as its backing file
//!                                      ─► -drive file=DIRECTORY/NAME.disk0.qcow2,format=qcow2
//! ```
//! Disks are `-drive`, and `-blockdev` with a format and the file's name in it or in a separate node.
//! Read-only disks, CD-ROMs and `snapshot=on` are left unchanged. An overlay is removed if its guest does not
//! start, and kept afterwards: it is the disk of an image that is saved of this guest.
//!
//! Limits: room is checked for the beginning of an overlay, not for all that its guest may write.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use rustix::fs::statvfs;

use crate::command_line::{CommandLine, ParseError, Properties, QemuOption, Rewrite, excerpt};
use crate::host::HostArguments;
use crate::policy::AllowedCommandLine;
use crate::runtime::GuestName;

mod current;

pub use current::DriveFiles;

/// Required free space for each overlay in bytes.
const ROOM_BYTES: u64 = 64 << 20;
/// Drivers of nodes that are the file of a format node.
const FILE_DRIVERS: [&str; 2] = ["file", "host_device"];
/// Drivers of nodes that have a format.
const FORMAT_DRIVERS: [&str; 8] = ["raw", "qcow2", "qcow", "qed", "vmdk", "vdi", "vhdx", "vpc"];
/// Drivers of nodes that pass everything on to the node of their `file`.
const FILTER_DRIVERS: [&str; 4] = ["throttle", "copy-on-read", "preallocate", "compress"];
/// Drivers of nodes that keep nothing.
const VOID_DRIVERS: [&str; 2] = ["null-co", "null-aio"];
/// QEMU's program that makes images of disks.
const TOOL: &str = "qemu-img";

/// Place of a guest's overlays.
#[derive(Debug, Clone, Copy)]
pub struct OverlayPlan<'a> {
    /// The guest.
    pub guest: &'a GuestName,
    /// Directory of the overlays.
    pub directory: &'a Path,
    /// Directory to which relative paths of disks are relative.
    pub working_directory: &'a Path,
}

/// The overlay of one disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Overlay {
    /// Key of the setting that changes the disk.
    pub setting: String,
    /// The disk: an absolute path, or a URL.
    pub base: String,
    /// Format of the disk.
    pub format: String,
    /// The file to be made.
    pub path: PathBuf,
}

/// An overlay or a disk that was made. It is removed when this value is dropped.
#[derive(Debug)]
pub struct CreatedDisk {
    path: Option<PathBuf>,
    file: fs::File,
}

/// An empty disk.
#[derive(Debug, Clone, Copy)]
pub struct NewDisk<'a> {
    /// The file to be made.
    pub path: &'a Path,
    /// Its format.
    pub format: &'a str,
    /// Size in bytes that the guest sees.
    pub bytes: u64,
}

/// Overlays and disks that cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum OverlayError {
    /// The disk's format is not given, and guessing it would let the guest choose it.
    #[error("disk {setting}: no overlay is possible without its format; set {setting}.format")]
    Format { setting: String },
    /// A disk that is described in another way.
    #[error("disk {setting}: no overlay is possible for {found}; describe it as -drive file=…,format=…")]
    Unsupported { setting: String, found: String },
    /// A file of this name exists.
    #[error(
        "{} exists already, perhaps as the disk of a saved guest",
        path.display()
    )]
    Exists { path: PathBuf },
    /// The directory cannot be used.
    #[error("directory {} of overlays: {source}", path.display())]
    Directory { path: PathBuf, source: io::Error },
    /// The filesystem is full, or nearly.
    #[error(
        "directory {} has {found} MiB free, expected {expected} MiB for {count} overlays",
        path.display()
    )]
    NoRoom {
        path: PathBuf,
        /// Free MiB.
        found: u64,
        /// Needed MiB.
        expected: u64,
        count: usize,
    },
    /// `qemu-img` cannot be executed.
    #[error("{} cannot be started: {source}; install the qemu-img of this QEMU", tool.display())]
    Tool { tool: PathBuf, source: io::Error },
    /// `qemu-img` failed.
    #[error("overlay {} of {base}: {text}; set {setting} to another disk", path.display())]
    NotMade {
        path: PathBuf,
        base: String,
        setting: String,
        /// Message of `qemu-img`.
        text: String,
    },
    /// A new disk cannot be made.
    #[error("disk {} cannot be made: {text}", path.display())]
    DiskNotMade {
        path: PathBuf,
        /// The system's error, or the message of `qemu-img`.
        text: String,
    },
    /// The command line cannot be read.
    #[error("{0}")]
    CommandLine(#[from] ParseError),
}

impl AllowedCommandLine {
    /// Redirects the guest's writes to overlays instead of its disks. Returns them; the caller must make them
    /// before the guest starts.
    ///
    /// # Errors
    /// A disk whose format is not given, or that is described in a way that is not known.
    pub fn use_overlays(&mut self, plan: &OverlayPlan<'_>) -> Result<Vec<Overlay>, OverlayError> {
        let (mut guest, mut own) = (self.command_line.clone(), self.own.clone());
        let direct: BTreeSet<String> = [&guest, &own].into_iter().flat_map(nodes_of_devices).collect();
        let mut overlays = replace_disks(&mut guest, plan, &direct)?;
        let of_user = replace_disks(&mut own, plan, &direct)?;
        if !of_user.is_empty() {
            (self.arguments, self.own) = (own.to_arguments(), own);
        }
        overlays.extend(of_user);
        refuse_equal_paths(&overlays)?;
        self.command_line = guest;
        Ok(overlays)
    }
}

/// Refuses two disks whose overlays would have one name: an id of the image and one of the user's arguments.
fn refuse_equal_paths(overlays: &[Overlay]) -> Result<(), OverlayError> {
    let mut seen = BTreeSet::new();
    match overlays.iter().find(|overlay| !seen.insert(&overlay.path)) {
        Some(overlay) => Err(unsupported(&overlay.setting, "a disk with the same id as another one".into())),
        None => Ok(()),
    }
}

impl Overlay {
    /// Checks that none of these files exists, and that their filesystems have room.
    ///
    /// # Errors
    /// [`OverlayError::Exists`], [`OverlayError::NoRoom`], [`OverlayError::Directory`].
    pub fn check(overlays: &[Self]) -> Result<(), OverlayError> {
        let mut counts: BTreeMap<u64, (PathBuf, usize)> = BTreeMap::new();
        for overlay in overlays {
            if fs::symlink_metadata(&overlay.path).is_ok() {
                return Err(OverlayError::Exists { path: overlay.path.clone() });
            }
            let directory = overlay.path.parent().unwrap_or(Path::new("/")).to_owned();
            let found = fs::metadata(&directory);
            let found =
                found.map_err(|source| OverlayError::Directory { path: directory.clone(), source })?;
            counts.entry(found.dev()).or_insert((directory, 0)).1 += 1;
        }
        for (path, count) in counts.into_values() {
            let free = statvfs(&path)
                .map_err(|errno| OverlayError::Directory { path: path.clone(), source: errno.into() })?;
            let found = (free.f_bavail * free.f_frsize) >> 20;
            let expected = (count as u64 * ROOM_BYTES) >> 20;
            if found < expected {
                return Err(OverlayError::NoRoom { path, found, expected, count });
            }
        }
        Ok(())
    }

    /// Makes the file, by the `qemu-img` beside the QEMU that will use it. Only this user may access it
    /// (0600), since it has the guest's writes.
    ///
    /// # Errors
    /// [`OverlayError::Exists`], [`OverlayError::Directory`], [`OverlayError::Tool`],
    /// [`OverlayError::NotMade`]. Nothing is left then, and a file that existed before is unchanged.
    pub fn create(&self, host: &HostArguments) -> Result<CreatedDisk, OverlayError> {
        let made = reserve(&self.path)?;
        let arguments = ["-f", "qcow2", "-F", &self.format, "-b", &self.base];
        let Some(text) = create_by_tool(&arguments, &self.path, None, host)? else { return Ok(made) };
        let Self { path, base, setting, .. } = self.clone();
        Err(OverlayError::NotMade { path, base, setting, text })
    }
}

impl NewDisk<'_> {
    /// Makes the file, as [`Overlay::create`] does; it takes no room before it is written to.
    ///
    /// # Errors
    /// [`OverlayError::Exists`], [`OverlayError::Tool`], [`OverlayError::DiskNotMade`].
    pub fn create(&self, host: &HostArguments) -> Result<CreatedDisk, OverlayError> {
        let failed = |text| OverlayError::DiskNotMade { path: self.path.to_owned(), text };
        let made = reserve(self.path).map_err(|error| match error {
            OverlayError::Directory { source, .. } => failed(source.to_string()),
            error => error,
        })?;
        match create_by_tool(&["-f", self.format], self.path, Some(self.bytes), host)? {
            None => Ok(made),
            Some(text) => Err(failed(text)),
        }
    }
}

/// Has `qemu-img` make this file. Returns its message if it has failed.
fn create_by_tool(
    arguments: &[&str],
    path: &Path,
    bytes: Option<u64>,
    host: &HostArguments,
) -> Result<Option<String>, OverlayError> {
    let tool = tool(&host.binary);
    let mut command: Command = crate::launcher::command(&HostArguments {
        binary: tool.clone(),
        environment: host.environment.clone(),
        ..HostArguments::default()
    });
    command.args(["create", "-q"]).args(arguments).arg(path);
    command.args(bytes.map(|bytes| bytes.to_string())).stdout(Stdio::null());
    let output = command.output().map_err(|source| OverlayError::Tool { tool, source })?;
    let text = String::from_utf8_lossy(&output.stderr);
    Ok((!output.status.success()).then(|| excerpt(text.trim())))
}

/// Makes the file empty, for `qemu-img` to write. It neither replaces a file nor follows a symbolic link, as `qemu-img` would.
fn reserve(path: &Path) -> Result<CreatedDisk, OverlayError> {
    let path = path.to_owned();
    match fs::File::options().write(true).create_new(true).mode(0o600).open(&path) {
        Ok(file) => Ok(CreatedDisk { path: Some(path), file }),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Err(OverlayError::Exists { path }),
        Err(source) => Err(OverlayError::Directory { path, source }),
    }
}

impl CreatedDisk {
    /// Has it belong to this user and group, if it does not.
    ///
    /// # Errors
    /// This process may not give files away.
    pub fn give_to(&self, user: u32, group: u32) -> io::Result<()> {
        let found = self.file.metadata()?;
        if (found.uid(), found.gid()) == (user, group) {
            return Ok(());
        }
        // Not by its name, which may be another file's where that user may write.
        std::os::unix::fs::fchown(&self.file, Some(user), Some(group))
    }

    /// The file.
    pub fn path(&self) -> Option<&Path> {
        self.path.as_deref()
    }

    /// Keeps the file beyond this value.
    pub fn keep(mut self) {
        self.path = None;
    }
}

impl AsFd for CreatedDisk {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl Drop for CreatedDisk {
    fn drop(&mut self) {
        let Some(path) = self.path.take() else { return };
        // Another file may have the name now.
        let removed = match (fs::symlink_metadata(&path), self.file.metadata()) {
            (Ok(named), Ok(own)) if (named.dev(), named.ino()) == (own.dev(), own.ino()) => {
                fs::remove_file(&path)
            }
            (Ok(_), Err(error)) => Err(error),
            _ => Ok(()),
        };
        if let Err(error) = removed {
            tracing::warn!(path = %path.display(), %error, "an overlay is left");
        }
    }
}

/// `qemu-img` beside a QEMU that is given by its path, else that of `PATH`. The former is an absolute path,
/// as the program runs in another directory.
fn tool(binary: &Path) -> PathBuf {
    let beside = binary.parent().filter(|parent| !parent.as_os_str().is_empty());
    let beside = beside.and_then(|parent| std::path::absolute(parent.join(TOOL)).ok());
    let beside = beside.filter(|tool| tool.is_file());
    beside.unwrap_or_else(|| TOOL.into())
}

/// Replaces the files of all disks to which a guest would write.
fn replace_disks(
    command_line: &mut CommandLine,
    plan: &OverlayPlan<'_>,
    direct: &BTreeSet<String>,
) -> Result<Vec<Overlay>, OverlayError> {
    let settings = command_line.setting_keys();
    let mut overlays = Vec::new();
    let mut files = BTreeSet::new();
    for (index, setting) in settings.iter().cloned().enumerate() {
        let Some(disk) = Disk::of(command_line, index, &setting)? else { continue };
        files.insert(disk.file_option);
        let overlay = Overlay {
            path: plan.directory.join(format!("{}.{}.qcow2", plan.guest, file_part(&setting))),
            base: absolute(&disk.file, plan.working_directory),
            format: disk.format.clone(),
            setting,
        };
        let path = overlay.path.to_str().ok_or_else(|| OverlayError::Directory {
            path: plan.directory.to_owned(),
            source: io::Error::new(io::ErrorKind::InvalidInput, "its path is not UTF-8"),
        })?;
        disk.redirect(command_line, index, path, "qcow2");
        overlays.push(overlay);
    }
    for (index, setting) in settings.iter().enumerate().filter(|(index, _)| !files.contains(index)) {
        if let Some(found) = written_node(command_line, index, direct) {
            return Err(unsupported(setting, found));
        }
    }
    Ok(overlays)
}

/// Names of the nodes that a guest's devices use.
fn nodes_of_devices(line: &CommandLine) -> Vec<String> {
    let properties = line.options().iter().filter(|option| option.name.as_str() != "blockdev");
    let values = properties.filter_map(QemuOption::properties).flat_map(Properties::pairs);
    values.map(|(_, value)| value).collect()
}

/// Describes a node without a format to which the guest may write. `None` if it may not, or writes to a node
/// that is judged separately.
fn written_node(line: &CommandLine, index: usize, direct: &BTreeSet<String>) -> Option<String> {
    let option = line.options().get(index).filter(|option| option.name.as_str() == "blockdev")?;
    let properties = option.properties()?;
    let value = |key: &str| properties.value(key).unwrap_or_default();
    let driver = value("driver");
    // Those with a format are overlaid.
    if properties.is_on("read-only") || FORMAT_DRIVERS.contains(&driver.as_str()) {
        return None;
    }
    let is_filter = FILTER_DRIVERS.contains(&driver.as_str()) && !value("file").is_empty();
    if is_filter || VOID_DRIVERS.contains(&driver.as_str()) {
        return None;
    }
    let name = value("node-name");
    let is_user =
        |other: &&QemuOption| other.properties().is_some_and(|of| of.value("file").as_ref() == Some(&name));
    let mut users =
        line.options().iter().filter(|other| other.name.as_str() == "blockdev").filter(is_user).peekable();
    let is_read_only = |user: &QemuOption| {
        let driver = user.property("driver").unwrap_or_default();
        let is_read_only = user.properties().is_some_and(|of| of.is_on("read-only"));
        FORMAT_DRIVERS.contains(&driver.as_str()) && is_read_only
    };
    let is_below_read_only = users.peek().is_some() && users.all(is_read_only) && !direct.contains(&name);
    (!is_below_read_only).then(|| format!("a writable node of driver {}", excerpt(&driver)))
}

/// A disk to which the guest writes, and the properties that describe it.
struct Disk {
    file: String,
    format: String,
    format_key: &'static str,
    /// Another key of the format, which is removed.
    format_alias: &'static str,
    /// Index of the option with the file's name.
    file_option: usize,
    file_key: &'static str,
    /// Key of the file's driver, beside its name.
    driver_key: &'static str,
}

impl Disk {
    /// Has it use another file, for the option at `index`, whose disk it is.
    fn redirect(&self, line: &mut CommandLine, index: usize, file: &str, format: &str) {
        let options = line.options_mut();
        if let Some(properties) = options[index].properties_mut() {
            properties.remove("backing");
            properties.remove(self.format_alias);
            properties.set(self.format_key, format);
        }
        if let Some(properties) = options[self.file_option].properties_mut() {
            properties.set(self.file_key, file);
            // An overlay is a regular file for any kind of disk.
            if properties.value(self.driver_key).is_some() {
                properties.set(self.driver_key, "file");
            }
        }
    }

    fn of(line: &CommandLine, index: usize, setting: &str) -> Result<Option<Self>, OverlayError> {
        let option = &line.options()[index];
        match (option.name.as_str(), option.properties()) {
            ("drive", Some(properties)) => Self::of_drive(properties, index, setting),
            ("blockdev", Some(properties)) => Self::of_node(line, properties, index, setting),
            (name, _) if option.rewrite() == Rewrite::Disk => {
                Err(unsupported(setting, format!("-{name}, which has no format")))
            }
            _ => Ok(None),
        }
    }

    fn of_drive(properties: &Properties, index: usize, setting: &str) -> Result<Option<Self>, OverlayError> {
        let is_unwritten = ["readonly", "read-only", "snapshot"].iter().any(|key| properties.is_on(key))
            || properties.value("media").as_deref() == Some("cdrom");
        let named = ["file", "file.filename"]
            .into_iter()
            .find_map(|key| Some((key, properties.value(key).filter(|file| !file.is_empty())?)));
        if is_unwritten {
            return Ok(None);
        }
        let Some((file_key, file)) = named else { return empty_drive(properties, setting) };
        let file_driver = properties.value("file.driver").unwrap_or_else(|| "file".into());
        if !FILE_DRIVERS.contains(&file_driver.as_str()) {
            return Err(unsupported(setting, format!("a file of driver {}", excerpt(&file_driver))));
        }
        let format = properties.value("format").or_else(|| properties.value("driver"));
        let format = format.ok_or_else(|| OverlayError::Format { setting: setting.to_owned() })?;
        let (format_key, format_alias, driver_key) = ("format", "driver", "file.driver");
        Ok(Some(Self { file, format, format_key, format_alias, file_option: index, file_key, driver_key }))
    }

    /// A node with a format; its file is named in it, or by a separate node.
    fn of_node(
        line: &CommandLine,
        properties: &Properties,
        index: usize,
        setting: &str,
    ) -> Result<Option<Self>, OverlayError> {
        let value = |key: &str| properties.value(key).unwrap_or_default();
        let format = value("driver");
        if !FORMAT_DRIVERS.contains(&format.as_str()) || properties.is_on("read-only") {
            // The file of another node, or nothing that a guest writes to.
            return Ok(None);
        }
        let names_file =
            FILE_DRIVERS.contains(&value("file.driver").as_str()) && !value("file.filename").is_empty();
        let (node, file_key, driver_key) = if names_file {
            (Some(index), "file.filename", "file.driver")
        } else {
            let node = line.options().iter().position(|option| is_file_node(option, &value("file")));
            (node, "filename", "driver")
        };
        let named = node.and_then(|node| Some((node, line.options()[node].property(file_key)?)));
        let (file_option, file) =
            named.ok_or_else(|| unsupported(setting, "a node whose file has no name".into()))?;
        let (format_key, format_alias) = ("driver", "format");
        Ok(Some(Self { file, format, format_key, format_alias, file_option, file_key, driver_key }))
    }
}

/// A drive without a file name: it has no medium, or one that is described in another way.
fn empty_drive(properties: &Properties, setting: &str) -> Result<Option<Disk>, OverlayError> {
    let driver = properties.value("driver").or_else(|| properties.value("format")).unwrap_or_default();
    let has_file = properties.pairs().iter().any(|(key, _)| *key == "filename" || key.starts_with("file."));
    if has_file || !driver.is_empty() && !VOID_DRIVERS.contains(&driver.as_str()) {
        Err(unsupported(setting, "a drive whose file has no name".into()))
    } else {
        Ok(None)
    }
}

fn is_file_node(option: &QemuOption, name: &str) -> bool {
    let driver = option.property("driver").unwrap_or_default();
    option.name.as_str() == "blockdev"
        && option.id().as_deref() == Some(name)
        && FILE_DRIVERS.contains(&driver.as_str())
}

fn unsupported(setting: &str, found: String) -> OverlayError {
    OverlayError::Unsupported { setting: setting.to_owned(), found }
}

/// A disk by a name that `qemu-img` finds from any directory. A URL is unchanged.
fn absolute(file: &str, directory: &Path) -> String {
    let protocol = file.split_once(':').map(|(before, _)| before).unwrap_or_default();
    if !protocol.is_empty() && !protocol.contains('/') {
        return file.to_owned();
    }
    directory.join(file).to_str().map_or_else(|| file.to_owned(), str::to_owned)
}

/// The part of an overlay's name that tells the disks of a guest apart.
fn file_part(setting: &str) -> &str {
    setting.split_once('.').map_or(setting, |(_, id)| id)
}

#[cfg(test)]
mod tests;
