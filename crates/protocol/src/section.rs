//! Section framing and commands (QEMU `migration/savevm.c`).

use alloc::string::String;
use alloc::vec::Vec;

use crate::wire::{Incomplete, Reader, Stop, lossy, put_counted, put16, put32};
use crate::{InvalidMessage, Result};

/// The byte that begins everything on the main channel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
#[allow(missing_docs, reason = "QEMU's own names")]
pub enum SectionType {
    Eof = 0x00,
    Start = 0x01,
    Part = 0x02,
    End = 0x03,
    Full = 0x04,
    Subsection = 0x05,
    VmDescription = 0x06,
    Configuration = 0x07,
    Command = 0x08,
    Footer = 0x7e,
}

impl SectionType {
    /// The type of this byte; an unknown one is an error that names what was `expected`.
    pub fn decode(byte: u8, expected: &'static str) -> Result<Self> {
        use SectionType::{
            Command, Configuration, End, Eof, Footer, Full, Part, Start, Subsection, VmDescription,
        };
        let all = [Eof, Start, Part, End, Full, Subsection, VmDescription, Configuration, Command, Footer];
        let unknown = || InvalidMessage::SectionType { found: byte, expected }.into();
        all.into_iter().find(|kind| *kind as u8 == byte).ok_or_else(unknown)
    }
}

/// The header after the type byte of START and FULL.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SectionHeader {
    /// The source's choice; PART, END and the footer repeat it.
    pub id: u32,
    /// The vmstate's name, e.g. `ram` or `0000:00:01.0/virtio-net`.
    pub name: String,
    /// Distinguishes devices of one name.
    pub instance: u32,
    /// The vmstate's version.
    pub version: u32,
}

impl SectionHeader {
    /// Appends the header without its type byte.
    pub fn encode(&self, kind: SectionType, out: &mut Vec<u8>) {
        out.push(kind as u8);
        put32(out, self.id);
        put_counted(out, self.name.as_bytes());
        put32(out, self.instance);
        put32(out, self.version);
    }

    /// Parses a section header whose type byte was consumed.
    pub fn decode(input: &mut Reader<'_>) -> Result<Self, Incomplete> {
        let id = input.be32()?;
        let name = lossy(input.counted()?);
        Ok(Self { id, name, instance: input.be32()?, version: input.be32()? })
    }
}

/// Appends the footer of section `id`.
pub fn put_footer(out: &mut Vec<u8>, id: u32) {
    out.push(SectionType::Footer as u8);
    put32(out, id);
}

/// A command's number. Unknown ones are kept, so an error can name them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CommandKind(pub u16);

#[allow(missing_docs, reason = "QEMU's own names (`enum qemu_vm_cmd`)")]
impl CommandKind {
    pub const OPEN_RETURN_PATH: Self = Self(1);
    pub const PING: Self = Self(2);
    pub const POSTCOPY_ADVISE: Self = Self(3);
    pub const POSTCOPY_LISTEN: Self = Self(4);
    pub const POSTCOPY_RUN: Self = Self(5);
    pub const POSTCOPY_RAM_DISCARD: Self = Self(6);
    pub const PACKAGED: Self = Self(7);
    pub const ENABLE_COLO: Self = Self(8);
    pub const POSTCOPY_RESUME: Self = Self(9);
    pub const RECV_BITMAP: Self = Self(10);
    pub const SWITCHOVER_START: Self = Self(11);
}

/// A command with its data.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum VmCommand {
    /// The source requests a return path on the same socket.
    OpenReturnPath,
    /// To be answered by PONG with the same value.
    Ping(u32),
    /// The guest is stopped now (machine types ≥ 10.0).
    SwitchoverStart,
    /// Any other.
    Other {
        /// Number of the command.
        kind: CommandKind,
        /// Data of the command.
        data: Vec<u8>,
    },
}

impl VmCommand {
    /// Appends the command with its section type byte.
    pub fn encode(&self, out: &mut Vec<u8>) {
        let ping;
        let (kind, data): (CommandKind, &[u8]) = match self {
            Self::OpenReturnPath => (CommandKind::OPEN_RETURN_PATH, &[]),
            Self::Ping(value) => {
                ping = value.to_be_bytes();
                (CommandKind::PING, &ping)
            }
            Self::SwitchoverStart => (CommandKind::SWITCHOVER_START, &[]),
            Self::Other { kind, data } => (*kind, data),
        };
        out.push(SectionType::Command as u8);
        put16(out, kind.0);
        put16(out, u16::try_from(data.len()).expect("a command's data has 64 KiB at most"));
        out.extend_from_slice(data);
    }

    /// Parses a command whose section type byte was consumed.
    pub(crate) fn decode(input: &mut Reader<'_>) -> Result<Self, Stop> {
        let (kind, length) = (CommandKind(input.be16()?), input.be16()?);
        let data = input.take(usize::from(length))?;
        let wrong = |expected| InvalidMessage::CommandLength { command: kind.0, found: data.len(), expected };
        match kind {
            CommandKind::OPEN_RETURN_PATH if data.is_empty() => Ok(Self::OpenReturnPath),
            CommandKind::SWITCHOVER_START if data.is_empty() => Ok(Self::SwitchoverStart),
            CommandKind::OPEN_RETURN_PATH | CommandKind::SWITCHOVER_START => Err(wrong(0).into()),
            CommandKind::PING => match data.try_into() {
                Ok(value) => Ok(Self::Ping(u32::from_be_bytes(value))),
                Err(_) => Err(wrong(4).into()),
            },
            _ => Ok(Self::Other { kind, data: data.into() }),
        }
    }
}
