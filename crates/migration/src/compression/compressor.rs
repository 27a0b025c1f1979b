//! Pages into a lane's compressed stream.

use flate2::{Compress, FlushCompress, Status};
use towline_channel::{IoBuf, gather};
use towline_protocol::multifd::Method;
use towline_protocol::{PageRef, limits};
use zstd::stream::raw::{Encoder, InBuffer, Operation, OutBuffer};

use super::Compression;
use crate::{Error, Guest, Result};

/// The sending end of a lane's compressed stream.
pub(crate) struct Compressor {
    stream: Stream,
    /// A packet's compressed form.
    output: Box<[u8]>,
    /// A packet's pages, if they had to be copied. Empty until then.
    copy: Vec<u8>,
}

enum Stream {
    Zlib(Compress),
    Zstd(Encoder<'static>),
}

impl Compressor {
    /// `None` without compression.
    pub(crate) fn new(compression: Compression) -> Result<Option<Self>> {
        let stream = match compression {
            Compression::None => return Ok(None),
            Compression::Zlib { level } => {
                let level = level.min(Compression::ZLIB_LEVEL_MAX);
                Stream::Zlib(Compress::new(flate2::Compression::new(level.into()), true))
            }
            Compression::Zstd { level } => {
                let level = level.min(Compression::ZSTD_LEVEL_MAX);
                Stream::Zstd(Encoder::new(level.into()).map_err(|error| failed(Method::Zstd, &error))?)
            }
        };
        let output = vec![0; limits::PACKET_COMPRESSED_BYTES_MAX].into_boxed_slice();
        Ok(Some(Self { stream, output, copy: Vec::new() }))
    }

    /// Compresses a packet's pages, of these runs of a guest's memory. Memory that may change is copied
    /// first.
    pub(crate) fn compress_memory(&mut self, guest: &dyn Guest, runs: &[(PageRef, u64)]) -> Result<&[u8]> {
        let still: Option<Vec<&[u8]>> =
            runs.iter().map(|&(page, length)| guest.immutable(page, length)).collect();
        if let Some(contents) = still {
            return self.compress(&contents);
        }
        let contents: Vec<IoBuf<'_>> =
            runs.iter().map(|&(page, length)| guest.memory(page, length)).collect();
        self.copy.resize(limits::PACKET_DATA_BYTES_MAX, 0);
        let copied = gather(&contents, &mut self.copy);
        self.stream.compress(&[&self.copy[..copied]], &mut self.output)
    }

    /// Compresses a packet's pages, which lie in `contents`.
    pub(crate) fn compress(&mut self, contents: &[&[u8]]) -> Result<&[u8]> {
        self.stream.compress(contents, &mut self.output)
    }
}

impl Stream {
    fn compress<'a>(&mut self, contents: &[&[u8]], output: &'a mut [u8]) -> Result<&'a [u8]> {
        let used = match self {
            Self::Zlib(stream) => deflate(stream, contents, output),
            Self::Zstd(stream) => encode(stream, contents, output),
        };
        let used = used.map_err(|error| failed(self.method(), &error))?;
        Ok(&output[..used])
    }

    fn method(&self) -> Method {
        match self {
            Self::Zlib(_) => Method::Zlib,
            Self::Zstd(_) => Method::Zstd,
        }
    }
}

impl std::fmt::Debug for Compressor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Compressor({})", self.stream.method().name())
    }
}

fn deflate(stream: &mut Compress, contents: &[&[u8]], output: &mut [u8]) -> std::io::Result<usize> {
    let begin = stream.total_out();
    // Bounded by the output.
    let used = |stream: &Compress| (stream.total_out() - begin) as usize;
    for content in contents {
        let mut left = *content;
        while !left.is_empty() {
            let before = stream.total_in();
            stream.compress(left, &mut output[used(stream)..], FlushCompress::None)?;
            let taken = (stream.total_in() - before) as usize;
            if taken == 0 {
                return Err(too_long());
            }
            left = &left[taken..];
        }
    }
    let flushed = stream.compress(&[], &mut output[used(stream)..], FlushCompress::Sync)?;
    // Where the buffer is full to the last byte, the flush may not have ended.
    if flushed == Status::Ok && used(stream) < output.len() { Ok(used(stream)) } else { Err(too_long()) }
}

fn encode(stream: &mut Encoder<'_>, contents: &[&[u8]], output: &mut [u8]) -> std::io::Result<usize> {
    let mut output = OutBuffer::around(output);
    for content in contents {
        let mut input = InBuffer::around(content);
        while input.pos() < content.len() {
            let before = (input.pos(), output.pos());
            stream.run(&mut input, &mut output)?;
            if (input.pos(), output.pos()) == before {
                return Err(too_long());
            }
        }
    }
    match stream.flush(&mut output)? {
        0 => Ok(output.pos()),
        _ => Err(too_long()),
    }
}

fn too_long() -> std::io::Error {
    std::io::Error::other("a packet's compressed form is longer than the method's worst case")
}

fn failed(method: Method, error: &std::io::Error) -> Error {
    Error::Compressor { method: method.name(), text: error.to_string() }
}
