//! Rewriting of an option when the guest gets another QEMU.

use super::form::Known;
use crate::names::{self, NameGroup};

/// Form of an option on the command line of another QEMU, while the QEMU that has it still runs on this
/// host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rewrite {
    /// The same: it describes the guest, or something that several QEMUs can have.
    Keep,
    /// The same, unless it has one of these properties, separated by blanks.
    KeepUnless(Conflict, &'static str),
    /// The same without this property.
    Remove(&'static str),
    /// Nothing: the launcher sets it, or it has no effect on a guest that arrives.
    Drop,
    /// The guest's name, which is part of the launcher's.
    Name,
    /// The same. The text is the name of a file that QEMU reads.
    File,
    /// The same. The text is the name of a disk's file, without a format.
    Disk,
    /// The same. Properties name the file of a disk.
    Drive,
    /// The other end of a port or monitor.
    Port,
    /// A file that QEMU writes, and removes at its end.
    Pidfile,
    /// A monitor, perhaps the launcher's.
    Monitor,
    /// A chardev that writes to a file.
    Append,
    /// A chardev that listens at, or is connected to, a socket.
    Socket,
    /// A network card in another process.
    Card,
    /// A vhost-user-vsock device, which QEMU does not migrate.
    Vsock,
    /// The guest's generation id.
    GenerationId,
    /// Two QEMUs cannot have it at a time.
    Refuse(Conflict),
    /// As its type.
    ByType,
    /// The same if an image may have the text. Other texts are not known.
    IfGuests,
}

/// Reason for which two QEMUs of one host cannot have an option at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Conflict {
    /// A port of the host on which QEMU listens.
    Port,
    /// QEMU's terminal.
    Terminal,
    /// A display or a sound device of the host.
    Display,
    /// A tap.
    Tap,
    /// A device of the host or of another process.
    HostDevice,
    /// Disks whose changes are in temporary files of QEMU.
    TemporaryFiles,
    /// A file of traces, which QEMU truncates.
    TraceFile,
    /// The guest is recorded or replayed.
    Recording,
    /// It is not listed.
    Unknown,
}

/// Types of an option. A name that ends with `*` is a prefix, and of several that match the first one counts.
#[derive(Debug)]
pub(crate) struct Types {
    /// Types that an image may have, with their properties in groups.
    pub(crate) image: &'static [NameGroup<&'static [&'static [Known]]>],
    /// Types that are rewritten in their own way. Others that an image may have are kept.
    pub(crate) rewrite: &'static [NameGroup<Rewrite>],
}

impl Types {
    pub(crate) fn rewrite(&self, kind: &str) -> Rewrite {
        let own = names::find(self.rewrite, kind).map(|(rewrite, _)| rewrite);
        let is_guests = || names::find(self.image, kind).is_some();
        own.unwrap_or_else(|| if is_guests() { Rewrite::Keep } else { Rewrite::Refuse(Conflict::Unknown) })
    }
}
