//! Pages out of a lane's compressed stream.

use flate2::{Decompress, FlushDecompress, Status};
use towline_channel::IoBufMut;
use towline_protocol::multifd::Method;
use towline_protocol::{InvalidMessage, limits};
use zstd::stream::raw::{DParameter, Decoder, InBuffer, Operation, OutBuffer};

use super::Compression;
use crate::{Error, Result};

/// The receiving end of a lane's compressed stream. Unusable after an error: the stream's state is lost.
pub(crate) struct Decompressor {
    stream: Stream,
    /// A packet's compressed form.
    input: Box<[u8]>,
}

enum Stream {
    Zlib(Decompress),
    Zstd(Decoder<'static>),
}

impl Decompressor {
    /// `None` if nothing is compressed.
    pub(crate) fn new(compression: Compression) -> Result<Option<Self>> {
        let stream = match compression {
            Compression::None => return Ok(None),
            Compression::Zlib { .. } => Stream::Zlib(Decompress::new(true)),
            Compression::Zstd { .. } => Stream::Zstd(decoder().map_err(|error| Error::Compressor {
                method: Method::Zstd.name(),
                text: error.to_string(),
            })?),
        };
        let input = vec![0; limits::PACKET_COMPRESSED_BYTES_MAX].into_boxed_slice();
        Ok(Some(Self { stream, input }))
    }

    pub(crate) fn method(&self) -> Method {
        match self.stream {
            Stream::Zlib(_) => Method::Zlib,
            Stream::Zstd(_) => Method::Zstd,
        }
    }

    /// Room for a packet's `length` compressed bytes, at most [`limits::PACKET_COMPRESSED_BYTES_MAX`].
    pub(crate) fn receive(&mut self, length: usize) -> IoBufMut<'_> {
        IoBufMut::from(&mut self.input[..length])
    }

    /// Fills `pages` from the `length` received bytes, which must decompress to exactly these pages.
    pub(crate) fn decompress(
        &mut self,
        length: usize,
        pages: &mut [u8],
    ) -> Result<(), towline_protocol::Error> {
        let method = self.method().name();
        let input = &self.input[..length];
        let (mut taken, mut given) = (0, 0);
        // The output has room for one more byte than the pages, which detects a stream that is too long.
        let mut beyond = [0; 1];
        loop {
            let is_full = given == pages.len();
            let room = if is_full { &mut beyond[..] } else { &mut pages[given..] };
            let (took, gave) = self
                .stream
                .step(&input[taken..], room)
                .map_err(|fault| InvalidMessage::Compressed { method, fault })?;
            if is_full && gave > 0 {
                return Err(InvalidMessage::CompressedTooLong { method, expected: pages.len() }.into());
            }
            (taken, given) = (taken + took, given + gave);
            if (took, gave) == (0, 0) {
                break;
            }
        }
        if given < pages.len() {
            let (found, expected) = (given, pages.len());
            return Err(InvalidMessage::CompressedTooShort { method, found, expected }.into());
        }
        if taken == input.len() {
            Ok(())
        } else {
            let fault = format!("its last {} bytes belong to nothing", input.len() - taken);
            Err(InvalidMessage::Compressed { method, fault }.into())
        }
    }
}

impl Stream {
    /// One step; returns the numbers of bytes consumed and produced. Both are 0 if it needs more input.
    fn step(&mut self, input: &[u8], output: &mut [u8]) -> Result<(usize, usize), String> {
        match self {
            Self::Zlib(stream) => {
                let before = (stream.total_in(), stream.total_out());
                let status = stream.decompress(input, output, FlushDecompress::None);
                if status.map_err(|error| error.to_string())? == Status::StreamEnd {
                    return Err("it ends the lane's stream, which lives as long as the lane".into());
                }
                // Both are bounded by the slices.
                let took = (stream.total_in() - before.0) as usize;
                Ok((took, (stream.total_out() - before.1) as usize))
            }
            Self::Zstd(stream) => {
                let (mut input, mut output) = (InBuffer::around(input), OutBuffer::around(output));
                stream.run(&mut input, &mut output).map_err(|error| error.to_string())?;
                Ok((input.pos(), output.pos()))
            }
        }
    }
}

impl std::fmt::Debug for Decompressor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Decompressor({})", self.method().name())
    }
}

/// A decoder with a window no larger than a QEMU can use, even if the stream's header requests more.
fn decoder() -> std::io::Result<Decoder<'static>> {
    let mut decoder = Decoder::new()?;
    decoder.set_parameter(DParameter::WindowLogMax(limits::ZSTD_WINDOW_LOG_MAX))?;
    Ok(decoder)
}
