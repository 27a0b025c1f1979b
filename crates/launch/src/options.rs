//! The options of QEMU 7.2 to 11.1, in one table.
//!
//! ```text
//!   OPTIONS: name ─► Syntax    how QEMU reads its value                  ─► CommandLine, the keys of settings
//!                 ─► ImageUse  what a command line from anyone may have  ─► Recorded::allow
//!                 ─► Rewrite   what the next QEMU of the guest has of it ─► overlays, upgrades
//! ```
//! Options with a type ([`types`], [`devices`]) have the last two for each type. Nothing here reads a command
//! line or changes one.
//!
//! Source: `qemu-options.hx` of these versions (documented in "Invocation" of QEMU's system emulation
//! manual). QEMU compares an option's name as a whole, after one dash or two: it accepts no abbreviation.

pub(crate) mod devices;
pub(crate) mod form;
mod rewrite;
mod types;

use std::fmt;

use crate::names::{self, NameGroup};
use form::{Form, Known};
pub(crate) use rewrite::Types;
pub use rewrite::{Conflict, Rewrite};

/// Syntax of an option's value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Syntax {
    /// Takes no value.
    Flag,
    /// A single text.
    Text,
    /// `key=value,…` with `,,` for a comma in a value. The first word may lack its key, which is then
    /// `implied`.
    Properties {
        /// Key of a first word without `=`.
        implied: Option<&'static str>,
        /// True if a value that begins with `{` is JSON.
        accepts_json: bool,
        /// Meaning of several options of this name.
        repeated: Repeated,
    },
    /// `model,feature,+feature,-feature,feature=value`, without an escape for commas.
    Cpu,
    /// `driver.property=value` with the rest unparsed, or properties.
    Global,
}

/// Meaning of several options of one name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Repeated {
    /// Each is one of its kind.
    Separate,
    /// Each is one of its kind, and an id distinguishes it.
    ById,
    /// Together they are one, in which the last value of a property counts.
    Merged,
}

/// An image's use of an option.
#[derive(Debug, Clone, Copy)]
pub(crate) enum ImageUse {
    /// No image may have it.
    Never,
    /// Belongs to the process rather than to its guest. It is not recorded.
    Process,
    /// Names something of the host.
    Host,
    /// A flag, or a text of this form.
    Text(Form),
    /// Properties.
    Properties(&'static [Known]),
    /// Properties that depend on the type, and these.
    Typed(&'static [Known]),
    /// `-cpu`.
    Cpu,
    /// `-global`.
    Global,
    /// `-serial`: a port, whose other end comes from this host.
    Serial,
}

/// Syntax of an option, and its place in an image and in a rewrite.
#[derive(Debug, Clone, Copy)]
pub(crate) struct OptionInfo {
    pub(crate) syntax: Syntax,
    pub(crate) image: ImageUse,
    pub(crate) rewrite: Rewrite,
    /// Types: values of the implied key.
    pub(crate) types: &'static Types,
}

/// Name of an option, without dashes; aliases are resolved (`M` is `machine`).
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct OptionName(&'static str);

/// Name of the words of an argv that do not begin with a dash: QEMU takes each as the file of a disk.
pub(crate) const DISK_FILE: OptionName = OptionName("(disk file)");

impl OptionName {
    /// Looks up an option by its name without dashes, as QEMU does.
    pub fn find(name: &str) -> Option<Self> {
        let name = ALIASES.iter().find(|(alias, _)| *alias == name).map_or(name, |(_, name)| name);
        if name == DISK_FILE.0 {
            return Some(DISK_FILE);
        }
        names::find(OPTIONS, name).map(|(_, known)| Self(known))
    }

    /// The name without dashes.
    pub fn as_str(self) -> &'static str {
        self.0
    }

    /// Syntax of the value.
    pub fn syntax(self) -> Syntax {
        self.info().syntax
    }

    /// Returns true for the options of networks.
    pub fn is_network(self) -> bool {
        ["net", "netdev", "nic"].contains(&self.0)
    }

    /// Returns true if the option belongs to the process rather than to its guest.
    pub(crate) fn is_of_process(self) -> bool {
        matches!(self.info().image, ImageUse::Process)
    }

    pub(crate) fn info(self) -> OptionInfo {
        // Only the file of a disk is not in the table.
        names::find(OPTIONS, self.0).map_or(row(Text, Host, Rewrite::Disk), |(info, _)| info)
    }
}

impl fmt::Display for OptionName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if *self == DISK_FILE { f.write_str("disk file") } else { write!(f, "-{}", self.0) }
    }
}

impl fmt::Debug for OptionName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

const ALIASES: &[(&str, &str)] = &[("M", "machine"), ("help", "h")];

const fn row(syntax: Syntax, image: ImageUse, rewrite: Rewrite) -> OptionInfo {
    OptionInfo { syntax, image, rewrite, types: &Types { image: &[], rewrite: &[] } }
}

/// An option with types.
const fn typed(syntax: Syntax, image: ImageUse, types: &'static Types) -> OptionInfo {
    OptionInfo { syntax, image, rewrite: ByType, types }
}

const fn json(implied: &'static str, repeated: Repeated) -> Syntax {
    Syntax::Properties { implied: Some(implied), accepts_json: true, repeated }
}

const fn keys(implied: &'static str, repeated: Repeated) -> Syntax {
    Syntax::Properties { implied: Some(implied), accepts_json: false, repeated }
}

const fn plain(repeated: Repeated) -> Syntax {
    Syntax::Properties { implied: None, accepts_json: false, repeated }
}

const UNKNOWN: Rewrite = Refuse(Conflict::Unknown);
const ON_PORT: Rewrite = Refuse(Conflict::Port);
const SHOWN: Rewrite = Refuse(Conflict::Display);
const TEMPORARY: Rewrite = Refuse(Conflict::TemporaryFiles);
const RECORDED: Rewrite = Rewrite::KeepUnless(Conflict::Recording, "rr");
const TRACED: Rewrite = Rewrite::KeepUnless(Conflict::TraceFile, "file");
const VGA: &[&str] = &["none", "std", "cirrus", "vmware", "qxl", "virtio"];
use Form::{Empty, KernelArguments, Number, One, Uuid, Word};
use ImageUse::{Host, Never, Process, Properties, Typed};
use Repeated::{ById, Merged, Separate};
use Rewrite::{ByType, Drop, Keep, Port, Refuse};
use Syntax::{Flag, Text};

// Not from an image: `nographic`, whose serial port would write to the log without a limit, and `snapshot`,
// with which the guest's writes to this host's disks would be lost.
const OPTIONS: &[NameGroup<OptionInfo>] = &[
    (row(Flag, Process, Drop), "S daemonize"),
    (row(Flag, Process, Keep), "async-teardown full-screen"),
    (row(Flag, Process, ON_PORT), "s"),
    (row(Flag, Process, UNKNOWN), "jitdump perfmap preconfig"),
    (row(Flag, Host, SHOWN), "nographic"),
    (row(Flag, Host, TEMPORARY), "snapshot"),
    (
        row(Flag, ImageUse::Text(Empty), Keep),
        "enable-kvm mem-prealloc no-acpi no-fd-bootchk no-hpet no-reboot no-shutdown no-user-config \
         nodefaults only-migratable singlestep usb win2k-hack",
    ),
    (
        row(Flag, Never, UNKNOWN),
        "audio-help enable-fips enable-sync-profile h old-param portrait semihosting version xen-attach \
         xen-domid-restrict",
    ),
    (row(Text, Process, Drop), "incoming"),
    (row(Text, Process, Keep), "L d dfilter k"),
    (row(Text, Process, ON_PORT), "gdb"),
    (row(Text, Process, Port), "monitor qmp qmp-pretty"),
    (row(Text, Process, Rewrite::Pidfile), "pidfile"),
    (row(Text, Process, UNKNOWN), "D chroot qtest qtest-log runas"),
    (row(Text, Host, Keep), "bios"),
    (row(Text, Host, Port), "debugcon"),
    (row(Text, Host, Rewrite::Disk), "fda fdb hda hdb hdc hdd mtdblock pflash sd"),
    (row(Text, Host, Rewrite::File), "cdrom dtb initrd kernel mem-path"),
    (row(Text, ImageUse::Serial, Port), "serial"),
    (row(Text, ImageUse::Text(One(&["none", "null"])), Port), "parallel"),
    (row(Text, ImageUse::Text(KernelArguments), Keep), "append"),
    (row(Text, ImageUse::Text(Number), Keep), "seed"),
    (row(Text, ImageUse::Text(Uuid), Keep), "uuid"),
    (row(Text, ImageUse::Text(One(VGA)), Keep), "vga"),
    (row(Text, ImageUse::Text(Word), Keep), "g watchdog-action"),
    (row(Text, ImageUse::Text(One(&["tablet", "mouse", "keyboard"])), Rewrite::IfGuests), "usbdevice"),
    (row(Text, Never, Drop), "loadvm"),
    (
        row(Text, Never, UNKNOWN),
        "dump-vmstate echr prom-env readconfig rotate set shim writeconfig xen-domid",
    ),
    (row(keys("accel", Separate), Properties(types::ACCELERATOR), Keep), "accel"),
    (row(plain(Separate), Host, Keep), "acpitable"),
    (row(plain(Merged), Properties(types::ACTION), Keep), "action"),
    (row(plain(Separate), Process, UNKNOWN), "add-fd"),
    (typed(keys("driver", Separate), Never, &types::AUDIO), "audio"),
    (typed(json("driver", ById), Typed(&[]), &types::AUDIO), "audiodev"),
    (row(json("driver", ById), Properties(types::BLOCKDEV), Rewrite::Drive), "blockdev"),
    (row(keys("order", Merged), Properties(types::BOOT), Keep), "boot"),
    (typed(json("backend", ById), Typed(&[]), &types::CHARDEVS), "chardev"),
    (row(json("deprecated-input", Separate), Never, Keep), "compat"),
    (row(Syntax::Cpu, ImageUse::Cpu, Keep), "cpu"),
    (typed(json("driver", ById), Typed(devices::COMMON), &devices::DEVICES), "device"),
    (typed(json("type", Separate), Process, &types::DISPLAYS), "display"),
    (row(plain(ById), Properties(types::DRIVE), Rewrite::Drive), "drive"),
    (row(keys("fsdriver", ById), Never, UNKNOWN), "fsdev"),
    (row(keys("fsdriver", Separate), Never, UNKNOWN), "virtfs"),
    (row(keys("name", Separate), Host, Keep), "fw_cfg"),
    (row(Syntax::Global, ImageUse::Global, Keep), "global"),
    (row(keys("shift", Merged), Properties(types::ICOUNT), RECORDED), "icount"),
    (row(plain(Separate), Never, Keep), "iscsi"),
    (row(keys("size", Merged), Properties(types::RAM), Keep), "m"),
    (typed(keys("type", Merged), Typed(types::MACHINE), &types::MACHINES), "machine"),
    (row(keys("chardev", Separate), Process, Rewrite::Monitor), "mon"),
    (row(plain(Separate), Process, Keep), "msg"),
    (row(keys("guest", Merged), Properties(types::NAME), Rewrite::Name), "name"),
    (typed(keys("type", Separate), Typed(&[]), &types::NETS), "net"),
    (typed(json("type", ById), Typed(&[]), &types::NETDEVS), "netdev"),
    (typed(keys("type", Separate), Typed(&[]), &types::NICS), "nic"),
    (typed(keys("type", Separate), Typed(&[]), &types::NUMA), "numa"),
    (typed(json("qom-type", ById), Typed(&[]), &types::OBJECTS), "object"),
    (row(keys("romfile", Separate), Host, Keep), "option-rom"),
    (row(plain(Merged), Process, Keep), "overcommit"),
    (row(keys("file", Separate), Never, UNKNOWN), "plugin"),
    (row(plain(Merged), Properties(types::CLOCK), Keep), "rtc"),
    (row(plain(Separate), Process, Rewrite::Remove("exit-with-parent")), "run-with"),
    (row(keys("enable", Separate), Process, Keep), "sandbox"),
    (row(keys("enable", Separate), Never, UNKNOWN), "semihosting-config"),
    (row(plain(Separate), Properties(types::SMBIOS), Keep), "smbios"),
    (row(keys("cpus", Merged), Properties(types::SMP), Keep), "smp"),
    (row(plain(Separate), Process, SHOWN), "spice"),
    (OptionInfo { rewrite: UNKNOWN, ..typed(keys("type", ById), Typed(&[]), &types::TPMS) }, "tpmdev"),
    (row(keys("enable", Separate), Process, TRACED), "trace"),
    (typed(keys("vnc", Separate), Process, &types::DISPLAYS), "vnc"),
];

/// Names of all options but the file of a disk.
#[cfg(test)]
pub(crate) fn names() -> impl Iterator<Item = &'static str> {
    names::all(OPTIONS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_found_whole_and_aliases_resolved() {
        assert_eq!(OptionName::find("M").unwrap().as_str(), "machine");
        assert_eq!(OptionName::find("mach"), None);
        assert_eq!(OptionName::find("-machine"), None);
        assert_eq!(OptionName::find("d").unwrap().as_str(), "d");
        assert_eq!(OptionName::find("nodefaults").unwrap().syntax(), Syntax::Flag);
    }

    #[test]
    fn names_are_unique() {
        let mut names: Vec<_> = names().collect();
        let found = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), found);
    }

    #[test]
    fn machine_types_are_matched_whole_or_by_series() {
        let is_known =
            |machine: &str| Word.admits(machine) && names::find(types::MACHINES.image, machine).is_some();
        for machine in ["q35", "pc-q35-11.1", "pc-i440fx-7.2", "virt", "none"] {
            assert!(is_known(machine), "{machine}");
        }
        for machine in ["", "q35x", "x-remote", "nitro-enclave", "xenfv", "pc-q35-/etc", "pc-"] {
            assert!(!is_known(machine), "{machine}");
        }
    }
}
