//! The options of QEMU 7.2 to 11.1 and the syntax of their values.
//!
//! Source: `qemu-options.hx` of these versions (documented in "Invocation" of QEMU's system emulation
//! manual). QEMU compares an option's name as a whole, after one dash or two: it accepts no abbreviation.

use std::fmt;

use crate::names::{self, NameGroup};

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
    },
    /// `model,feature,+feature,-feature,feature=value`, without an escape for commas.
    Cpu,
    /// `driver.property=value` with the rest unparsed, or properties.
    Global,
}

/// Name of an option, without dashes; aliases are resolved (`M` is `machine`).
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct OptionName(&'static str);

/// Name of the words of an argv that do not begin with a dash: QEMU takes each as the file of a disk.
pub(crate) const DISK_FILE: OptionName = OptionName("(disk file)");

impl OptionName {
    /// Looks up an option by its name without dashes, as QEMU does.
    #[must_use]
    pub fn find(name: &str) -> Option<Self> {
        let name = ALIASES.iter().find(|(alias, _)| *alias == name).map_or(name, |(_, name)| name);
        if name == DISK_FILE.0 {
            return Some(DISK_FILE);
        }
        names::find(OPTIONS, name).map(|(_, known)| Self(known))
    }

    /// The name without dashes.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        self.0
    }

    /// Syntax of its value.
    #[must_use]
    pub fn syntax(self) -> Syntax {
        names::find(OPTIONS, self.0).map_or(Syntax::Text, |(syntax, _)| syntax)
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

const OPTIONS: &[NameGroup<Syntax>] = &[
    (
        Flag,
        "S async-teardown audio-help daemonize enable-fips enable-kvm enable-sync-profile full-screen h \
         jitdump mem-prealloc no-acpi no-fd-bootchk no-hpet no-reboot no-shutdown no-user-config nodefaults \
         nographic old-param only-migratable perfmap portrait preconfig s semihosting singlestep snapshot \
         usb version win2k-hack xen-attach xen-domid-restrict",
    ),
    (keys("accel"), "accel"),
    (KEYS, "acpitable action add-fd drive iscsi msg overcommit rtc run-with smbios spice"),
    (
        Text,
        "append bios cdrom chroot d D debugcon dfilter dtb dump-vmstate echr fda fdb g gdb hda hdb hdc hdd \
         incoming initrd k kernel L loadvm mem-path monitor mtdblock parallel pflash pidfile prom-env qmp \
         qmp-pretty qtest qtest-log readconfig rotate runas sd seed serial set shim usbdevice uuid vga \
         watchdog-action writeconfig xen-domid",
    ),
    (keys("driver"), "audio"),
    (keys_or_json("driver"), "audiodev blockdev device"),
    (keys("order"), "boot"),
    (keys_or_json("backend"), "chardev"),
    (keys_or_json("deprecated-input"), "compat"),
    (Syntax::Cpu, "cpu"),
    (keys_or_json("type"), "display netdev"),
    (keys("fsdriver"), "fsdev virtfs"),
    (keys("name"), "fw_cfg"),
    (Syntax::Global, "global"),
    (keys("shift"), "icount"),
    (keys("size"), "m"),
    (keys("type"), "machine net nic numa tpmdev"),
    (keys("chardev"), "mon"),
    (keys("guest"), "name"),
    (keys_or_json("qom-type"), "object"),
    (keys("romfile"), "option-rom"),
    (keys("file"), "plugin"),
    (keys("enable"), "sandbox semihosting-config trace"),
    (keys("cpus"), "smp"),
    (keys("vnc"), "vnc"),
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
        let mut names: Vec<_> = names::all(OPTIONS).collect();
        let found = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), found);
    }
}
