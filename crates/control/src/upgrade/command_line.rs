//! The command line of the new QEMU: that of the old one, except for what both cannot have at a time.
//!
//! ```text
//!   sockets it listens on, pidfile ─► staging names (`staging_names`), never waiting for a client
//!   files it writes its consoles to ─► appended to, not truncated
//!   -incoming, -S, -daemonize, the launcher's own monitor, -run-with exit-with-parent ─► left out
//!   machine type ─► the versioned one; vmgenid ─► the value that the guest has
//!   reconnect of a chardev ─► reconnect-ms, or back, as the new QEMU has it
//!   ports, taps, host devices, other processes' sockets, whatever is not listed ─► refused, with the setting that changes it
//! ```
//! An option that a setting of the user replaces is the user's: it is neither changed nor refused. One of which a setting changes a
//! property is changed like any other, except for that property, and is not refused.

use std::collections::BTreeSet;
use std::path::Path;

use super::cards::{Cards, SharedCard};
use towline_launch::command_line::{OptionName, OptionValue, Properties, QemuOption};
use towline_launch::{CommandLine, QemuVersion, Setting, is_known_model};

use super::error::IncompatibleSetting;
use super::ports::{Port, parse_port};
use crate::staging_names::StagingName;

/// Longest path of a Unix socket.
const SOCKET_PATH_BYTES_MAX: usize = 107;
/// Id of the monitor that the launcher gives each QEMU.
const LAUNCHERS_MONITOR: &str = "towline-qmp";
/// Property of `-run-with`, of QEMU 10.2 and later.
const EXIT_WITH_PARENT: &str = "exit-with-parent";
/// Properties of chardevs: seconds, which QEMU 11 has no longer, and milliseconds.
const RECONNECT: &str = "reconnect";
const RECONNECT_MS: &str = "reconnect-ms";
/// First version with [`RECONNECT_MS`].
const RECONNECT_MS_SINCE: QemuVersion = QemuVersion { major: 9, minor: 2 };
/// Prefix of ids of chardevs that are made here.
const PORT_ID: &str = "towline-port";

/// Options that do not describe the guest, and that the launcher sets itself.
const DROPPED: [&str; 4] = ["S", "daemonize", "incoming", "loadvm"];
/// Name of the file of a disk, which has no option.
const DISK_FILE: &str = "(disk file)";
/// Options that the new QEMU has as they are, and the files of disks. Files that they name are read, or locked by QEMU as in a
/// migration.
const KEPT: &str = "\
    L accel acpitable action append async-teardown bios blockdev boot cdrom compat cpu d dfilter drive dtb \
    enable-kvm fda fdb full-screen fw_cfg g global hda hdb hdc hdd icount initrd iscsi k kernel m machine \
    mem-path mem-prealloc msg mtdblock name no-acpi no-fd-bootchk no-hpet no-reboot no-shutdown \
    no-user-config nodefaults numa only-migratable option-rom overcommit pflash rtc run-with sandbox sd \
    seed smbios smp usb uuid singlestep trace vga watchdog-action win2k-hack";
/// Options of [`KEPT`] that name a file, which QEMU looks for in its directory.
const FILES: &str = "cdrom dtb fda fdb hda hdb hdc hdd initrd kernel mem-path mtdblock option-rom pflash sd";
/// Properties that name a file of a drive or node.
const FILE_PROPERTIES: [&str; 3] = ["file", "filename", "file.filename"];
/// Objects that open nothing which the old QEMU has for itself.
const OBJECTS: [&str; 8] = [
    "iothread",
    "rng-builtin",
    "rng-random",
    "secret",
    "throttle-group",
    "thread-context",
    "cryptodev-backend-builtin",
    "main-loop",
];
const OBJECT_PREFIXES: [&str; 3] = ["memory-backend-", "tls-creds-", "authz-"];
/// Devices of the host, or of other processes.
const HOST_DEVICES: [&str; 8] =
    ["vfio-", "vhost-", "usb-host", "ivshmem", "virtio-9p", "nvdimm", "virtio-pmem", "virtio-mem"];

const PORT_REASON: &str = "the old QEMU listens there until the guest has left it; set another address";
const CLIENT_REASON: &str = "it is connected to another process, which may not accept a second connection; set one that listens (server=on)";
const TERMINAL_REASON: &str =
    "the terminal is the old QEMU's; set a socket or a file (unix:/run/NAME,server=on,wait=off)";
const DISPLAY_REASON: &str = "the old QEMU has this display; set another, or none";
const DESCRIPTOR_REASON: &str = "it is a descriptor of the old QEMU; set a path";
const DAEMON_REASON: &str = "it is relative to the directory in which the old QEMU was started, which a daemon leaves; set an absolute path";
const REPLAY_REASON: &str =
    "QEMU that records or replays a guest ends when it is asked to move it; end the recording first";
const TRACE_REASON: &str = "the old QEMU writes this file, and the new one would truncate it; set another";
const CARD_REASON: &str = "its card is in another process; have a `towline net` serve both QEMUs with --with-devices, or unplug the card before";
const CARD_LISTENS_REASON: &str = "QEMU does not connect to this card by a path, so that the new one cannot connect as well; unplug the card before";
const UNKNOWN_REASON: &str = "it is not known whether two QEMUs can have it; set it to the value for the new one, or remove it with an empty value";

/// Facts of the old QEMU that its command line does not have.
#[derive(Debug)]
pub(super) struct OldQemuFacts<'a> {
    pub(super) working_directory: &'a Path,
    /// Version of the new QEMU.
    pub(super) version: QemuVersion,
    /// Machine type, with its version.
    pub(super) machine: &'a str,
    /// The guest's vmgenid.
    pub(super) generation_id: Option<&'a str>,
    pub(super) settings: &'a [Setting],
    /// Devices that are attached once the guest is in the new QEMU.
    pub(super) vsocks: Vsocks,
    /// Chardevs of vsocks that were plugged in since its start.
    pub(super) vsock_chardevs: &'a [String],
    /// Devices whose process serves both QEMUs.
    pub(super) cards: Cards,
    /// Number of this upgrade, in the staging names.
    pub(super) number: u32,
}

/// Treatment of vhost-user-vsock devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Vsocks {
    /// They are refused, as QEMU does not migrate them.
    Refused,
    /// They are detached, and attached again in the new QEMU.
    Detached,
}

/// See the module's text.
#[derive(Debug, Default)]
pub(super) struct Rewritten {
    pub(super) command_line: CommandLine,
    /// The value of `-name`, which the launcher's own precedes.
    pub(super) name: Option<String>,
    pub(super) names: Vec<StagingName>,
    /// Cards whose processes serve both QEMUs.
    pub(super) cards: Vec<SharedCard>,
}

/// Rewrites the command line of the old QEMU.
///
/// # Errors
/// All options that are refused.
pub(super) fn rewrite(
    old: &CommandLine,
    context: &OldQemuFacts<'_>,
) -> Result<Rewritten, Vec<IncompatibleSetting>> {
    let (mut vsock_chardevs, card_chardevs) = (vsock_chardevs(old), card_chardevs(old));
    vsock_chardevs.extend(context.vsock_chardevs.iter().cloned());
    let keys = old.setting_keys();
    let mut rewriter = Rewriter {
        context,
        vsock_chardevs,
        card_chardevs,
        is_daemon: old.named("daemonize").next().is_some(),
        keys: keys.clone(),
        names: Vec::new(),
        cards: Vec::new(),
        added: Vec::new(),
        refusals: Vec::new(),
    };
    let mut rewritten = Rewritten::default();
    for (option, key) in old.options().iter().zip(keys) {
        if option.name.as_str() == "name" {
            rewritten.name = option.value_text();
            continue;
        }
        if let Some(option) = rewriter.option(option, &key) {
            rewritten.command_line.options_mut().push(option);
        }
    }
    rewritten.command_line.options_mut().append(&mut rewriter.added);
    set_machine(&mut rewritten.command_line, context.machine);
    let chardevs =
        rewritten.command_line.options_mut().iter_mut().filter(|option| option.name.as_str() == "chardev");
    chardevs
        .filter_map(QemuOption::properties_mut)
        .for_each(|chardev| set_reconnect(chardev, context.version));
    rewritten.names = rewriter.names;
    rewritten.cards = rewriter.cards;
    if rewriter.refusals.is_empty() { Ok(rewritten) } else { Err(rewriter.refusals) }
}

/// Replaces an alias by the machine type that the guest has.
fn set_machine(command_line: &mut CommandLine, machine: &str) {
    let is_machine = |option: &&mut QemuOption| option.name.as_str() == "machine";
    let last = command_line.options_mut().iter_mut().rfind(is_machine);
    if let Some(properties) = last.and_then(QemuOption::properties_mut) {
        properties.set("type", machine);
        return;
    }
    command_line.options_mut().extend(option("machine", machine));
}

/// Sets the time until a chardev connects again by the property that this version of QEMU has.
fn set_reconnect(chardev: &mut Properties, version: QemuVersion) {
    let value = |name| chardev.value(name).and_then(|value| value.parse::<u64>().ok());
    if version >= RECONNECT_MS_SINCE {
        let Some(milliseconds) = value(RECONNECT).and_then(|seconds| seconds.checked_mul(1000)) else {
            return;
        };
        chardev.remove(RECONNECT);
        chardev.set(RECONNECT_MS, &milliseconds.to_string());
    } else {
        let Some(milliseconds) = value(RECONNECT_MS) else { return };
        chardev.remove(RECONNECT_MS);
        chardev.set(RECONNECT, &milliseconds.div_ceil(1000).to_string());
    }
}

/// Chardevs of vhost-user-vsock devices.
fn vsock_chardevs(command_line: &CommandLine) -> BTreeSet<String> {
    let devices = command_line.named("device").filter(|device| is_vsock(device));
    devices.filter_map(|device| device.properties()?.value("chardev")).collect()
}

/// Chardevs of vhost-user network cards.
fn card_chardevs(command_line: &CommandLine) -> BTreeSet<String> {
    let is_card = |properties: &&Properties| properties.value("type").as_deref() == Some("vhost-user");
    let properties = command_line.named("netdev").filter_map(QemuOption::properties);
    properties.filter(is_card).filter_map(|properties| properties.value("chardev")).collect()
}

fn is_vsock(device: &QemuOption) -> bool {
    let driver = device.properties().and_then(|properties| properties.value("driver"));
    driver.is_some_and(|driver| driver.starts_with("vhost-user-vsock"))
}

fn option(name: &str, value: &str) -> Option<QemuOption> {
    QemuOption::parse(OptionName::find(name)?, Some(value)).ok()
}

/// `-run-with` without `exit-with-parent`: the parent of the new QEMU is towline, which exits.
fn without_parent(option: &QemuOption) -> Option<QemuOption> {
    let mut changed = option.clone();
    let properties = changed.properties_mut()?;
    properties.remove(EXIT_WITH_PARENT);
    let is_empty = properties.pairs().is_empty();
    (!is_empty).then_some(changed)
}

/// The words of a port behind its path that its new name does not have. A log is not truncated.
fn kept_words(words: &str) -> impl Iterator<Item = &str> {
    let is_changed = |word: &str| {
        let key = word.split('=').next().unwrap_or_default();
        ["", "server", "wait", "nowait", "logappend"].contains(&key)
    };
    let has_log = words.split(',').any(|word| word.starts_with("logfile="));
    words.split(',').filter(move |word| !is_changed(word)).chain(has_log.then_some("logappend=on"))
}

/// The refusal of a QEMU that would end with towline, as options or arguments of the user request it.
pub(super) fn refuse_end_with_parent(arguments: &CommandLine) -> Option<IncompatibleSetting> {
    let value = |option: &QemuOption| option.properties()?.value(EXIT_WITH_PARENT);
    let found = arguments.named("run-with").filter_map(value).find(|value| is_on(Some(value.clone())))?;
    Some(IncompatibleSetting {
        setting: format!("run-with.{EXIT_WITH_PARENT}"),
        found,
        reason: "the new QEMU would end with towline, and the guest with it; leave it out".into(),
    })
}

fn is_on(value: Option<String>) -> bool {
    value.is_some_and(|value| ["on", "yes", "true", "y"].contains(&value.as_str()))
}

struct Rewriter<'a> {
    context: &'a OldQemuFacts<'a>,
    vsock_chardevs: BTreeSet<String>,
    card_chardevs: BTreeSet<String>,
    /// It has left the directory to which its relative paths belong.
    is_daemon: bool,
    /// Keys of the settings of all options.
    keys: Vec<String>,
    names: Vec<StagingName>,
    cards: Vec<SharedCard>,
    added: Vec<QemuOption>,
    refusals: Vec<IncompatibleSetting>,
}

impl Rewriter<'_> {
    fn option(&mut self, option: &QemuOption, key: &str) -> Option<QemuOption> {
        let name = option.name.as_str();
        if DROPPED.contains(&name) {
            return None;
        }
        if self.is_set_by_user(key) {
            return Some(option.clone());
        }
        if !self.has_property_set(key) {
            return self.rewrite(option, key);
        }
        // The user's value follows. The rest of the option is changed like any other, unless that is what would be refused.
        let (refusals, names, added) = (self.refusals.len(), self.names.len(), self.added.len());
        let rewritten = self.rewrite(option, key);
        if self.is_set_by_user(&format!("{key}.path")) {
            self.names.truncate(names);
        }
        if rewritten.is_some() {
            return rewritten;
        }
        self.refusals.truncate(refusals);
        self.names.truncate(names);
        self.added.truncate(added);
        Some(option.clone())
    }

    fn rewrite(&mut self, option: &QemuOption, key: &str) -> Option<QemuOption> {
        let name = option.name.as_str();
        let text = option.value_text().unwrap_or_default();
        if text.contains("/dev/fdset/") {
            return self.refuse(key, &text, DESCRIPTOR_REASON);
        }
        match (name, &option.value) {
            ("chardev", OptionValue::Properties(properties)) => self.chardev(option, properties, key),
            ("mon", OptionValue::Properties(properties)) => {
                let is_launchers = properties.value("chardev").as_deref() == Some(LAUNCHERS_MONITOR);
                (!is_launchers).then(|| option.clone())
            }
            ("device", OptionValue::Properties(properties)) => self.device(option, properties, key),
            ("object", OptionValue::Properties(properties)) => self.object(option, properties, key),
            ("netdev" | "net" | "nic", OptionValue::Properties(properties)) => {
                self.network(option, properties, key)
            }
            ("drive", OptionValue::Properties(properties)) => self.drive(option, properties, key),
            (
                "qmp" | "qmp-pretty" | "monitor" | "serial" | "parallel" | "debugcon",
                OptionValue::Text(text),
            ) => self.port(option, text, key),
            ("pidfile", OptionValue::Text(path)) => self.pidfile(path, key),
            ("display" | "vnc" | "spice" | "nographic" | "audio" | "audiodev", _) => {
                self.display(option, &text, key)
            }
            ("usbdevice", OptionValue::Text(kind))
                if ["tablet", "mouse", "keyboard"].contains(&kind.as_str()) =>
            {
                Some(option.clone())
            }
            ("snapshot", _) => self.refuse(
                key,
                "",
                "what the guest wrote to its disks is in temporary files of the old QEMU",
            ),
            ("run-with", OptionValue::Properties(_)) => without_parent(option),
            ("trace", _) if text.split(',').any(|word| word.starts_with("file=")) => {
                self.refuse(key, &text, TRACE_REASON)
            }
            ("gdb" | "s", _) => self.refuse(key, &text, PORT_REASON),
            ("icount", OptionValue::Properties(properties)) if properties.value("rr").is_some() => {
                self.refuse(key, &text, REPLAY_REASON)
            }
            ("blockdev", OptionValue::Properties(properties)) => {
                self.has_known_files(properties, key).then(|| option.clone())
            }
            (name, OptionValue::Text(path))
                if name == DISK_FILE || FILES.split(' ').any(|file| file == name) =>
            {
                self.has_known_path(path, key).then(|| option.clone())
            }
            (name, _) if name == DISK_FILE || KEPT.split(' ').any(|kept| kept == name) => {
                Some(option.clone())
            }
            _ => self.refuse(key, &text, UNKNOWN_REASON),
        }
    }

    /// Returns true if a setting has this key.
    fn is_set_by_user(&self, key: &str) -> bool {
        self.context.settings.iter().any(|setting| setting.key == key)
    }

    /// Returns true if a setting has the key of a property of this option. Ids may have dots: the longest key that fits is meant.
    fn has_property_set(&self, key: &str) -> bool {
        let is_of = |setting: &Setting, key: &str| {
            setting.key.strip_prefix(key).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
        };
        let is_of_longer = |setting: &Setting| {
            self.keys.iter().any(|other| other.len() > key.len() && is_of(setting, other))
        };
        self.context.settings.iter().any(|setting| is_of(setting, key) && !is_of_longer(setting))
    }

    fn refuse(&mut self, key: &str, found: &str, reason: &str) -> Option<QemuOption> {
        let found: String = found.chars().take(120).collect();
        self.refusals.push(IncompatibleSetting { setting: key.to_owned(), found, reason: reason.to_owned() });
        None
    }

    /// The staging name of a path, as QEMU gets it.
    fn staged(&mut self, path: &str, key: &str) -> Option<String> {
        if !self.has_known_path(path, key) {
            return None;
        }
        let target = self.context.working_directory.join(path);
        let name = StagingName::new(&target, self.context.number);
        let staged = name.path.to_str().map(str::to_owned);
        let Some(staged) = staged.filter(|staged| !staged.contains([',', '='])) else {
            self.refuse(key, path, "its path has a comma or a '='; set another path");
            return None;
        };
        if staged.len() > SOCKET_PATH_BYTES_MAX {
            let reason = format!(
                "{staged}, its name for the time of the upgrade, has {} bytes, expected at most {SOCKET_PATH_BYTES_MAX}; set a shorter \
                 path",
                staged.len()
            );
            self.refuse(key, path, &reason);
            return None;
        }
        self.names.push(name);
        Some(staged)
    }

    /// Refuses a relative path of a daemon: QEMU has left its directory since.
    fn has_known_path(&mut self, path: &str, key: &str) -> bool {
        let is_known = !self.is_daemon || Path::new(path).is_absolute();
        if !is_known {
            self.refuse(key, path, DAEMON_REASON);
        }
        is_known
    }

    /// Refuses relative names of a daemon's drive. A name with a protocol (`nbd:…`) is not one of a file.
    fn has_known_files(&mut self, properties: &Properties, key: &str) -> bool {
        let files = FILE_PROPERTIES.iter().filter_map(|name| Some((name, properties.value(name)?)));
        let is_file = |value: &str| !value.contains(':') && !value.is_empty();
        let mut files = files.filter(|(_, value)| is_file(value)).collect::<Vec<_>>().into_iter();
        files.all(|(name, value)| self.has_known_path(&value, &format!("{key}.{name}")))
    }

    fn pidfile(&mut self, path: &str, key: &str) -> Option<QemuOption> {
        let staged = self.staged(path, key)?;
        option("pidfile", &staged)
    }

    fn chardev(&mut self, option: &QemuOption, properties: &Properties, key: &str) -> Option<QemuOption> {
        let value = |name: &str| properties.value(name);
        let id = value("id").unwrap_or_default();
        let mut changed = option.clone();
        if let Some(log) = value("logfile") {
            if !self.has_known_path(&log, key) {
                return None;
            }
            // QEMU would truncate it at its start.
            changed.properties_mut()?.set_switch("logappend", true);
        }
        match value("backend").unwrap_or_default().as_str() {
            "null" | "ringbuf" | "memory" | "vc" => Some(changed),
            "file" => {
                if !self.has_known_path(&value("path").unwrap_or_default(), key) {
                    return None;
                }
                changed.properties_mut()?.set_switch("append", true);
                Some(changed)
            }
            "socket" if value("fd").is_some() && id == LAUNCHERS_MONITOR => None,
            "socket" if value("fd").is_some() => self.refuse(key, &id, DESCRIPTOR_REASON),
            "socket" if self.card_chardevs.contains(&id) => self.card(option, properties, key),
            "socket" if is_on(value("abstract")) => self.refuse(key, &id, PORT_REASON),
            "socket" => match value("path") {
                Some(path) if is_on(value("server")) => {
                    let staged = self.staged(&path, key)?;
                    let properties = changed.properties_mut()?;
                    properties.set("path", &staged);
                    properties.remove("nowait");
                    properties.set_switch("wait", false);
                    Some(changed)
                }
                Some(_) if self.vsock_chardevs.contains(&id) => match self.context.vsocks {
                    Vsocks::Detached => Some(changed),
                    // Its device is refused.
                    Vsocks::Refused => None,
                },
                Some(path) => self.refuse(key, &path, CLIENT_REASON),
                None => self.refuse(key, &value("port").unwrap_or_default(), PORT_REASON),
            },
            "stdio" | "pty" => self.refuse(key, &id, TERMINAL_REASON),
            backend => self.refuse(key, backend, UNKNOWN_REASON),
        }
    }

    /// The connection to a card.
    fn card(&mut self, option: &QemuOption, properties: &Properties, key: &str) -> Option<QemuOption> {
        if self.context.cards == Cards::Refused {
            // Its network is refused.
            return None;
        }
        let is_plain = |name: &str| !is_on(properties.value(name));
        match properties.value("path").filter(|_| is_plain("server") && is_plain("abstract")) {
            Some(path) if self.has_known_path(&path, key) => {
                let chardev = properties.value("id").unwrap_or_default();
                self.cards.push(SharedCard { chardev, socket: self.context.working_directory.join(path) });
                Some(option.clone())
            }
            Some(_) => None,
            None => self.refuse(key, &properties.value("path").unwrap_or_default(), CARD_LISTENS_REASON),
        }
    }

    fn port(&mut self, option_before: &QemuOption, text: &str, key: &str) -> Option<QemuOption> {
        let name = option_before.name.as_str();
        match parse_port(text) {
            Port::Own => Some(option_before.clone()),
            Port::Listening { prefix, path, words } => {
                let staged = self.staged(path, key)?;
                let words: String = kept_words(words).map(|word| format!(",{word}")).collect();
                option(name, &format!("{prefix}unix:{staged},server=on,wait=off{words}"))
            }
            Port::File { path } => {
                if !self.has_known_path(path, key) {
                    return None;
                }
                let id = format!("{PORT_ID}{}-{}", self.context.number, self.added.len());
                let path = path.replace(',', ",,");
                self.added.extend(option("chardev", &format!("file,id={id},path={path},append=on")));
                option(name, &format!("chardev:{id}"))
            }
            Port::Terminal => self.refuse(key, text, TERMINAL_REASON),
            Port::Connected => self.refuse(key, text, CLIENT_REASON),
            Port::Network => self.refuse(key, text, PORT_REASON),
            Port::Unknown => self.refuse(key, text, UNKNOWN_REASON),
        }
    }

    fn device(&mut self, option: &QemuOption, properties: &Properties, key: &str) -> Option<QemuOption> {
        let driver = properties.value("driver").unwrap_or_default();
        if is_vsock(option) {
            return match self.context.vsocks {
                Vsocks::Detached => None,
                Vsocks::Refused => {
                    self.refuse(key, &driver, "QEMU does not migrate it; detach it with --detach-vsock")
                }
            };
        }
        if HOST_DEVICES.iter().any(|prefix| driver.starts_with(prefix)) {
            let reason = "it is a device of the host or of another process, which has one QEMU at a time; unplug it before";
            return self.refuse(key, &driver, reason);
        }
        if driver == "vmgenid" {
            let mut changed = option.clone();
            // Another one would be written into the guest's memory, and have it believe that it is a clone.
            if let (Some(guid), Some(properties)) = (self.context.generation_id, changed.properties_mut()) {
                properties.set("guid", guid);
            }
            return Some(changed);
        }
        if is_known_model(&driver) {
            return Some(option.clone());
        }
        self.refuse(
            key,
            &driver,
            "this device model is not known; unplug it before, or set it to the value for the new QEMU",
        )
    }

    fn object(&mut self, option: &QemuOption, properties: &Properties, key: &str) -> Option<QemuOption> {
        let kind = properties.value("qom-type").unwrap_or_default();
        let is_known =
            OBJECTS.contains(&kind.as_str()) || OBJECT_PREFIXES.iter().any(|prefix| kind.starts_with(prefix));
        if is_known { Some(option.clone()) } else { self.refuse(key, &kind, UNKNOWN_REASON) }
    }

    fn network(&mut self, option: &QemuOption, properties: &Properties, key: &str) -> Option<QemuOption> {
        let kind = properties.value("type").unwrap_or_default();
        let reason = match kind.as_str() {
            "none" | "hubport" => return Some(option.clone()),
            "nic" if option.name.as_str() == "net" => return Some(option.clone()),
            "user" => {
                let ports = ["hostfwd", "guestfwd", "smb"];
                match ports.into_iter().find(|port| properties.value(port).is_some()) {
                    None => return Some(option.clone()),
                    Some(port) => {
                        let value = properties.value(port).unwrap_or_default();
                        return self.refuse(&format!("{key}.{port}"), &value, PORT_REASON);
                    }
                }
            }
            "tap" => {
                "a tap has one QEMU at a time; give the guest a card of `towline net`, or set another tap and connect it to the same bridge"
            }
            "vhost-user" => match self.context.cards {
                Cards::Shared => return Some(option.clone()),
                Cards::Refused => CARD_REASON,
            },
            _ => UNKNOWN_REASON,
        };
        self.refuse(key, &kind, reason)
    }

    fn drive(&mut self, option: &QemuOption, properties: &Properties, key: &str) -> Option<QemuOption> {
        if is_on(properties.value("snapshot")) {
            let reason = "what the guest wrote to it is in a temporary file of the old QEMU";
            return self.refuse(&format!("{key}.snapshot"), "on", reason);
        }
        self.has_known_files(properties, key).then(|| option.clone())
    }

    fn display(&mut self, option: &QemuOption, text: &str, key: &str) -> Option<QemuOption> {
        let is_none = matches!(text, "none") || text.starts_with("none,");
        if is_none || option.name.as_str() == "audio" && text == "driver=none" {
            return Some(option.clone());
        }
        self.refuse(key, text, DISPLAY_REASON)
    }
}

#[cfg(test)]
mod tests;
