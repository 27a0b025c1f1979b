//! Frames (RFC 6455, section 5): encodes and decodes them.

use crate::framed::{Pack, Unpack, Unpacked};
use crate::lock::lock;
use crate::{Error, IoCursor, Result, gather};
use std::io::Cursor;
use std::ops::Range;
use std::sync::{Arc, Mutex};
use tungstenite::protocol::frame::FrameHeader;
use tungstenite::protocol::frame::coding::{Control, Data, OpCode};

/// Maximum length of the data in a frame that is sent.
const SENT_BYTES_MAX: usize = 256 << 10;
/// The longest header.
const HEADER_BYTES_MAX: usize = 14;
/// Room for a frame that is sent.
pub(super) const BATCH_BYTES: usize = HEADER_BYTES_MAX + SENT_BYTES_MAX;
/// The longest frame that may come.
pub(super) const PAYLOAD_BYTES_MAX: u64 = 1 << 30;
/// Maximum payload of a control frame (RFC 6455, section 5.5).
const CONTROL_BYTES_MAX: u64 = 125;
/// Status of an intended end, in a Close frame.
const CLOSE_NORMAL: [u8; 2] = 1000_u16.to_be_bytes();

/// The end of the connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum WebSocketRole {
    /// Masks what it sends.
    Client,
    /// Does not.
    Server,
}

/// The last ping received and not answered; earlier ones need no answer.
pub(super) type UnansweredPing = Mutex<Option<Vec<u8>>>;

/// The sending half.
#[derive(Debug)]
pub(super) struct FrameWriter {
    side: WebSocketRole,
    ping: Arc<UnansweredPing>,
}

impl FrameWriter {
    pub(super) fn new(side: WebSocketRole, ping: Arc<UnansweredPing>) -> Self {
        Self { side, ping }
    }

    /// Builds a frame around the payload after the space for the longest header; returns its range.
    fn frame(&self, opcode: OpCode, length: usize, room: &mut [u8]) -> Range<usize> {
        let mask = (self.side == WebSocketRole::Client).then(|| fastrand::u32(..).to_ne_bytes());
        let header = FrameHeader { opcode, mask, ..FrameHeader::default() };
        let start = HEADER_BYTES_MAX - header.len(length as u64);
        let mut head = &mut room[start..HEADER_BYTES_MAX];
        header.format(length as u64, &mut head).expect("the room is as long as the header");
        let end = HEADER_BYTES_MAX + length;
        if let Some(mask) = mask {
            apply(mask, &mut room[HEADER_BYTES_MAX..end]);
        }
        start..end
    }

    fn control(&self, control: Control, payload: &[u8], room: &mut [u8]) -> Range<usize> {
        room[HEADER_BYTES_MAX..][..payload.len()].copy_from_slice(payload);
        self.frame(OpCode::Control(control), payload.len(), room)
    }
}

impl Pack for FrameWriter {
    fn due(&mut self, room: &mut [u8], _peer: &str) -> Result<Option<Range<usize>>> {
        Ok(lock(&self.ping).take().map(|payload| self.control(Control::Pong, &payload, room)))
    }

    fn pack(&mut self, data: &mut IoCursor<'_, '_>, room: &mut [u8]) -> Range<usize> {
        let mut length = 0;
        while length < SENT_BYTES_MAX && !data.is_empty() {
            let gathered = gather(data.chunk(), &mut room[HEADER_BYTES_MAX + length..]);
            data.advance(gathered);
            length += gathered;
        }
        self.frame(OpCode::Data(Data::Binary), length, room)
    }

    fn end(&mut self, room: &mut [u8]) -> Range<usize> {
        self.control(Control::Close, &CLOSE_NORMAL, room)
    }
}

/// The receiving half.
#[derive(Debug)]
pub(super) struct FrameReader {
    side: WebSocketRole,
    ping: Arc<UnansweredPing>,
    /// Outstanding bytes of the present data frame.
    left: u64,
    /// For the next of them.
    mask: Option<[u8; 4]>,
    /// True while fragments of the present message are outstanding.
    in_message: bool,
}

impl FrameReader {
    pub(super) fn new(side: WebSocketRole, ping: Arc<UnansweredPing>) -> Self {
        Self { side, ping, left: 0, mask: None, in_message: false }
    }

    fn payload(&mut self, bytes: &mut [u8]) -> Unpacked {
        let length = bytes.len().min(usize::try_from(self.left).unwrap_or(usize::MAX));
        if let Some(mask) = &mut self.mask {
            apply(*mask, &mut bytes[..length]);
            mask.rotate_left(length % 4);
        }
        self.left -= length as u64;
        Unpacked::Data(0..length, length)
    }

    fn control(
        &mut self,
        control: Control,
        start: usize,
        length: usize,
        bytes: &mut [u8],
        mask: Option<[u8; 4]>,
    ) -> Unpacked {
        let end = start + length;
        let Some(payload) = bytes.get_mut(start..end) else { return Unpacked::Incomplete };
        match control {
            Control::Close => return Unpacked::End,
            Control::Ping => {
                apply(mask.unwrap_or_default(), payload);
                *lock(&self.ping) = Some(payload.to_vec());
            }
            _ => {}
        }
        Unpacked::Idle(end)
    }

    fn check(&self, header: &FrameHeader, length: u64) -> Result<(), String> {
        if header.rsv1 || header.rsv2 || header.rsv3 {
            return Err("it sent a frame of an extension, and none was agreed on".into());
        }
        if header.mask.is_some() != (self.side == WebSocketRole::Server) {
            let text = if header.mask.is_some() {
                "a masked frame, which only clients"
            } else {
                "a frame without a mask, which only servers"
            };
            return Err(format!("it sent {text} send"));
        }
        match header.opcode {
            OpCode::Control(_) if !header.is_final || length > CONTROL_BYTES_MAX => Err(format!(
                "it sent a control frame of {length} bytes or in fragments, the limit is {CONTROL_BYTES_MAX}"
            )),
            OpCode::Control(_) => Ok(()),
            OpCode::Data(Data::Text) => Err("it sent text, expected binary messages".into()),
            OpCode::Data(data) if self.in_message != (data == Data::Continue) => {
                Err("it sent the fragments of a message out of order".into())
            }
            OpCode::Data(_) if length > PAYLOAD_BYTES_MAX => {
                Err(format!("it sent a frame of {length} bytes, the limit is {PAYLOAD_BYTES_MAX}"))
            }
            OpCode::Data(_) => Ok(()),
        }
    }
}

impl Unpack for FrameReader {
    const PACKET_BYTES_MAX: usize = 16 << 10;

    fn unpack(&mut self, bytes: &mut [u8], peer: &str) -> Result<Unpacked> {
        if bytes.is_empty() {
            return Ok(Unpacked::Incomplete);
        }
        if self.left > 0 {
            return Ok(self.payload(bytes));
        }
        let mut cursor = Cursor::new(&*bytes);
        let parsed = FrameHeader::parse(&mut cursor)
            .map_err(|fault| Error::websocket(peer, format!("it sent an invalid frame: {fault}")))?;
        let start = cursor.position() as usize;
        let Some((header, length)) = parsed else { return Ok(Unpacked::Incomplete) };
        self.check(&header, length).map_err(|why| Error::websocket(peer, why))?;
        match header.opcode {
            OpCode::Control(control) => Ok(self.control(control, start, length as usize, bytes, header.mask)),
            OpCode::Data(_) => {
                (self.left, self.mask, self.in_message) = (length, header.mask, !header.is_final);
                Ok(Unpacked::Idle(start))
            }
        }
    }

    fn fault(peer: &str, why: String) -> Error {
        Error::websocket(peer, why)
    }
}

/// Masks, and unmasks.
fn apply(mask: [u8; 4], bytes: &mut [u8]) {
    let mut words = bytes.chunks_exact_mut(4);
    for word in &mut words {
        let word: &mut [u8; 4] = word.try_into().expect("of this length");
        *word = (u32::from_ne_bytes(*word) ^ u32::from_ne_bytes(mask)).to_ne_bytes();
    }
    for (byte, mask) in words.into_remainder().iter_mut().zip(mask) {
        *byte ^= mask;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::IoBuf;
    use proptest::prelude::*;

    /// Takes apart what comes in pieces of these sizes; returns the data.
    fn read(reader: &mut FrameReader, bytes: &[u8], sizes: &[usize]) -> Result<Vec<u8>> {
        let (mut data, mut waiting, mut rest) = (Vec::new(), Vec::new(), bytes);
        for size in sizes.iter().cycle() {
            if rest.is_empty() {
                break;
            }
            let (piece, left) = rest.split_at((*size).min(rest.len()));
            waiting.extend_from_slice(piece);
            rest = left;
            loop {
                match reader.unpack(&mut waiting, "peer")? {
                    Unpacked::Incomplete => break,
                    Unpacked::End => return Ok(data),
                    Unpacked::Idle(taken) => drop(waiting.drain(..taken)),
                    Unpacked::Data(range, taken) => {
                        data.extend_from_slice(&waiting[range]);
                        waiting.drain(..taken);
                    }
                }
            }
        }
        Ok(data)
    }

    proptest! {
        #[test]
        fn framed_data_is_received_unchanged(
            contents in prop::collection::vec(prop::collection::vec(any::<u8>(), 1..300), 1..8),
            sizes in prop::collection::vec(1..40usize, 1..9),
            client: bool,
        ) {
            let (from, to) = if client { (WebSocketRole::Client, WebSocketRole::Server) } else { (WebSocketRole::Server, WebSocketRole::Client) };
            let ping = Arc::new(UnansweredPing::default());
            let mut writer = FrameWriter::new(from, Arc::clone(&ping));
            let (mut room, mut bytes) = (vec![0; BATCH_BYTES], Vec::new());
            for content in &contents {
                let bufs = [IoBuf::from(&content[..])];
                let frame = writer.pack(&mut IoCursor::new(&bufs), &mut room);
                bytes.extend_from_slice(&room[frame]);
                *lock(&ping) = Some(b"ping".to_vec());
                let pong = writer.due(&mut room, "peer").unwrap().unwrap();
                bytes.extend_from_slice(&room[pong]);
            }
            let end = writer.end(&mut room);
            bytes.extend_from_slice(&room[end]);
            let mut reader = FrameReader::new(to, Arc::default());
            prop_assert_eq!(read(&mut reader, &bytes, &sizes).unwrap(), contents.concat());
        }

        #[test]
        fn any_bytes_are_data_an_end_or_an_error(
            bytes in prop::collection::vec(any::<u8>(), 0..200),
            sizes in prop::collection::vec(1..40usize, 1..9),
        ) {
            let mut reader = FrameReader::new(WebSocketRole::Server, Arc::default());
            match read(&mut reader, &bytes, &sizes) {
                Ok(data) => prop_assert!(data.len() <= bytes.len()),
                Err(Error::WebSocket { .. }) => {}
                Err(error) => prop_assert!(false, "{error}"),
            }
        }
    }
}
