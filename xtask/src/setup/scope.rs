//! Extent of a set-up.

/// Parts to bring.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Scope {
    /// Packages, which need root.
    System,
    /// Requirements of `make demo`: QEMU and a Linux guest.
    Demo,
    /// Everything.
    Lab,
}
