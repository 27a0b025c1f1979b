//! The options of QEMU 7.2 to 11.1 and the syntax of their values.
//!
//! Source: `qemu-options.hx` of these versions (documented in "Invocation" of QEMU's system emulation manual). QEMU compares an option's
//! name as a whole, after one dash or two: it accepts no abbreviation.

use std::fmt;

/// Syntax of an option's value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Syntax {
    /// Takes no value.
    Flag,
    /// One text that is not divided further.
    Text,
    /// `key=value,…` with `,,` for a comma in a value. The first word may lack its key, which is then `implied`.
    Properties {
        /// Key of a first word without `=`.
        implied: Option<&'static str>,
        /// True if a value that begins with `{` is JSON.
        accepts_json: bool,
    },
    /// `model,feature,+feature,-feature,feature=value`, without an escape for commas.
    Cpu,
    /// `driver.property=value` with the rest as it is, or properties.
    Global,
}

/// Name of an option, without dashes; aliases are resolved (`M` is `machine`).
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct OptionName(&'static str);

/// Name of the words of an argv that do not begin with a dash: QEMU takes each for the file of a disk.
pub(crate) const DISK_FILE: OptionName = OptionName("(disk file)");

impl OptionName {
    /// Looks up an option by its name without dashes, as QEMU does.
    #[must_use]
    pub fn find(name: &str) -> Option<Self> {
        let name = ALIASES.iter().find(|(alias, _)| *alias == name).map_or(name, |(_, name)| name);
        if name == DISK_FILE.0 {
            return Some(DISK_FILE);
        }
        OPTIONS.iter().find(|(known, _)| *known == name).map(|(known, _)| Self(known))
    }

    /// Its name without dashes.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        self.0
    }

    /// Syntax of its value.
    #[must_use]
    pub fn syntax(self) -> Syntax {
        let found = OPTIONS.iter().find(|(name, _)| *name == self.0);
        found.map_or(Syntax::Text, |(_, syntax)| *syntax)
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

const fn keys(implied: &'static str) -> Syntax {
    Syntax::Properties { implied: Some(implied), accepts_json: false }
}

const fn keys_or_json(implied: &'static str) -> Syntax {
    Syntax::Properties { implied: Some(implied), accepts_json: true }
}

const KEYS: Syntax = Syntax::Properties { implied: None, accepts_json: false };
use Syntax::{Flag, Text};

const OPTIONS: &[(&str, Syntax)] = &[
    ("S", Flag),
    ("accel", keys("accel")),
    ("acpitable", KEYS),
    ("action", KEYS),
    ("add-fd", KEYS),
    ("append", Text),
    ("async-teardown", Flag),
    ("audio", keys("driver")),
    ("audio-help", Flag),
    ("audiodev", keys_or_json("driver")),
    ("bios", Text),
    ("blockdev", keys_or_json("driver")),
    ("boot", keys("order")),
    ("cdrom", Text),
    ("chardev", keys_or_json("backend")),
    ("chroot", Text),
    ("compat", keys_or_json("deprecated-input")),
    ("cpu", Syntax::Cpu),
    ("d", Text),
    ("D", Text),
    ("daemonize", Flag),
    ("debugcon", Text),
    ("device", keys_or_json("driver")),
    ("dfilter", Text),
    ("display", keys_or_json("type")),
    ("drive", KEYS),
    ("dtb", Text),
    ("dump-vmstate", Text),
    ("echr", Text),
    ("enable-fips", Flag),
    ("enable-kvm", Flag),
    ("enable-sync-profile", Flag),
    ("fda", Text),
    ("fdb", Text),
    ("fsdev", keys("fsdriver")),
    ("full-screen", Flag),
    ("fw_cfg", keys("name")),
    ("g", Text),
    ("gdb", Text),
    ("global", Syntax::Global),
    ("h", Flag),
    ("hda", Text),
    ("hdb", Text),
    ("hdc", Text),
    ("hdd", Text),
    ("icount", keys("shift")),
    ("incoming", Text),
    ("initrd", Text),
    ("iscsi", KEYS),
    ("jitdump", Flag),
    ("k", Text),
    ("kernel", Text),
    ("L", Text),
    ("loadvm", Text),
    ("m", keys("size")),
    ("machine", keys("type")),
    ("mem-path", Text),
    ("mem-prealloc", Flag),
    ("mon", keys("chardev")),
    ("monitor", Text),
    ("msg", KEYS),
    ("mtdblock", Text),
    ("name", keys("guest")),
    ("net", keys("type")),
    ("netdev", keys_or_json("type")),
    ("nic", keys("type")),
    ("no-acpi", Flag),
    ("no-fd-bootchk", Flag),
    ("no-hpet", Flag),
    ("no-reboot", Flag),
    ("no-shutdown", Flag),
    ("no-user-config", Flag),
    ("nodefaults", Flag),
    ("nographic", Flag),
    ("numa", keys("type")),
    ("object", keys_or_json("qom-type")),
    ("old-param", Flag),
    ("only-migratable", Flag),
    ("option-rom", keys("romfile")),
    ("overcommit", KEYS),
    ("parallel", Text),
    ("perfmap", Flag),
    ("pflash", Text),
    ("pidfile", Text),
    ("plugin", keys("file")),
    ("portrait", Flag),
    ("preconfig", Flag),
    ("prom-env", Text),
    ("qmp", Text),
    ("qmp-pretty", Text),
    ("qtest", Text),
    ("qtest-log", Text),
    ("readconfig", Text),
    ("rotate", Text),
    ("rtc", KEYS),
    ("run-with", KEYS),
    ("runas", Text),
    ("s", Flag),
    ("sandbox", keys("enable")),
    ("sd", Text),
    ("seed", Text),
    ("semihosting", Flag),
    ("semihosting-config", keys("enable")),
    ("serial", Text),
    ("set", Text),
    ("shim", Text),
    ("singlestep", Flag),
    ("smbios", KEYS),
    ("smp", keys("cpus")),
    ("snapshot", Flag),
    ("spice", KEYS),
    ("tpmdev", keys("type")),
    ("trace", keys("enable")),
    ("usb", Flag),
    ("usbdevice", Text),
    ("uuid", Text),
    ("version", Flag),
    ("vga", Text),
    ("virtfs", keys("fsdriver")),
    ("vnc", keys("vnc")),
    ("watchdog-action", Text),
    ("win2k-hack", Flag),
    ("writeconfig", Text),
    ("xen-attach", Flag),
    ("xen-domid", Text),
    ("xen-domid-restrict", Flag),
];

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
        let mut names: Vec<_> = OPTIONS.iter().map(|(name, _)| name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), OPTIONS.len());
    }
}
