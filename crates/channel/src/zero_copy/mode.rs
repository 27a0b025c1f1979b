use std::fmt;

/// Use of zero-copy for large sends to TCP: QEMU's `zero-copy-send`, with an automatic choice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ZeroCopySend {
    /// Where it pays: the sender measures if the kernel copies anyway.
    #[default]
    Auto,
    /// All possible sends, even where the kernel copies in the end.
    On,
    /// None.
    Off,
}

impl fmt::Display for ZeroCopySend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Auto => "auto",
            Self::On => "on",
            Self::Off => "off",
        })
    }
}
