//! A server whose disks are written and never read, as the target of a mirror is.

use std::io::{self, BufReader, Read as _, Write as _};
use std::os::unix::net::UnixStream;

use serde::{Deserialize, Serialize};

use super::{
    ACK, DISCONNECT, FLUSH, GO, GREETING, INFO, INFO_EXPORT, OPTION, OPTION_ERROR, OPTION_REPLY,
    REQUEST_BYTES, ReadNumbers as _, Request, SIMPLE_REPLY, TRIM, WRITE, WRITE_ZEROES, invalid,
};

/// `NBD_FLAG_FIXED_NEWSTYLE` and `NBD_FLAG_NO_ZEROES`.
const SERVER_FLAGS: u16 = 3;
/// `NBD_FLAG_HAS_FLAGS`, and that it takes `FLUSH`, `TRIM` and `WRITE_ZEROES`.
const EXPORT_FLAGS: u16 = 1 | 1 << 2 | 1 << 5 | 1 << 6;
const ABORT: u32 = 2;
const UNSUPPORTED: u32 = OPTION_ERROR | 1;
const UNKNOWN: u32 = OPTION_ERROR | 6;
/// Longest option, and number of them.
const OPTION_BYTES_MAX: u32 = 8192;
const OPTIONS_MAX: usize = 64;
/// Flag of a write of zeros that keeps its space allocated: the one that is kept.
const NO_HOLE: u16 = 1 << 1;

/// A disk that is offered.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Export {
    pub(crate) name: String,
    pub(crate) bytes: u64,
}

/// Request of a client that changes its disk, or flushes it.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Change<'a> {
    /// A request that changes this number of its bytes, as [`NbdClient::replay`](super::NbdClient::replay) repeats it.
    Write { request: &'a [u8], bytes: u32 },
    /// All before it is to be on the storage.
    Flush,
}

/// A connection to one of the exports.
#[derive(Debug)]
pub(crate) struct NbdServer {
    stream: BufReader<UnixStream>,
    disk_bytes: u64,
}

impl NbdServer {
    /// Negotiates. Returns the number of the export that the client has chosen; `None`: it has gone.
    ///
    /// # Errors
    /// The system's; `InvalidData` for what is not NBD.
    pub(crate) fn negotiate(stream: UnixStream, exports: &[Export]) -> io::Result<Option<(usize, Self)>> {
        let mut this = Self { stream: BufReader::new(stream), disk_bytes: 0 };
        this.send(
            &[&GREETING.to_be_bytes()[..], &OPTION.to_be_bytes(), &SERVER_FLAGS.to_be_bytes()].concat(),
        )?;
        let _flags = this.stream.u32()?;
        for _ in 0..OPTIONS_MAX {
            let (magic, option, bytes) = (this.stream.u64()?, this.stream.u32()?, this.stream.u32()?);
            if magic != OPTION || bytes > OPTION_BYTES_MAX {
                return Err(unexpected("an option"));
            }
            let mut data = vec![0; bytes as usize];
            this.stream.read_exact(&mut data)?;
            match option {
                GO => match exports.iter().position(|export| is_named(&data, &export.name)) {
                    Some(number) => {
                        this.disk_bytes = exports[number].bytes;
                        let info = [
                            &INFO_EXPORT.to_be_bytes()[..],
                            &this.disk_bytes.to_be_bytes(),
                            &EXPORT_FLAGS.to_be_bytes(),
                        ];
                        this.reply(option, INFO, &info.concat())?;
                        this.reply(option, ACK, &[])?;
                        return Ok(Some((number, this)));
                    }
                    None => this.reply(option, UNKNOWN, b"no such disk")?,
                },
                ABORT => {
                    this.reply(option, ACK, &[])?;
                    return Ok(None);
                }
                _ => this.reply(option, UNSUPPORTED, &[])?,
            }
        }
        Err(unexpected("many options"))
    }

    /// Serves requests until the client disconnects. `change` is done with each one when it returns.
    ///
    /// # Errors
    /// Of `change`; the connection ends; `InvalidData`, and `InvalidInput` for a request that was refused.
    pub(crate) fn serve(&mut self, change: &mut dyn FnMut(Change<'_>) -> io::Result<()>) -> io::Result<()> {
        let mut whole = Vec::new();
        loop {
            let request = Request::decode(&mut self.stream)?;
            if request.kind == DISCONNECT {
                return Ok(());
            }
            whole.clear();
            let kept = Request { flags: request.flags & NO_HOLE, ..request };
            whole.extend(kept.encode());
            whole.resize(REQUEST_BYTES + request.content_bytes()?, 0);
            self.stream.read_exact(&mut whole[REQUEST_BYTES..])?;
            // A client whose request is not done has another disk than this one: it gets no reply, and no further one.
            match request.kind {
                FLUSH => change(Change::Flush)?,
                WRITE | TRIM | WRITE_ZEROES if request.changes(self.disk_bytes).is_some() => {
                    change(Change::Write { request: &whole, bytes: request.bytes })?;
                }
                _ => return Err(io::Error::new(io::ErrorKind::InvalidInput, format!("{request:?}"))),
            }
            self.send(&[&SIMPLE_REPLY.to_be_bytes()[..], &[0; 4], &request.cookie.to_be_bytes()].concat())?;
        }
    }

    fn reply(&mut self, option: u32, kind: u32, data: &[u8]) -> io::Result<()> {
        let length = data.len() as u32;
        let head = [option, kind, length].map(u32::to_be_bytes).concat();
        self.send(&[&OPTION_REPLY.to_be_bytes()[..], &head, data].concat())
    }

    fn send(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.stream.get_mut().write_all(bytes)
    }
}

/// Returns true if the data of an option begins with this name.
fn is_named(data: &[u8], name: &str) -> bool {
    let Some((length, rest)) = data.split_first_chunk() else { return false };
    rest.get(..u32::from_be_bytes(*length) as usize) == Some(name.as_bytes())
}

fn unexpected(what: &str) -> io::Error {
    invalid(format!("QEMU's NBD client sent {what} that is not expected"))
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;
    use std::time::Duration;

    use super::super::NbdClient;
    use super::*;

    const DISK_BYTES: u64 = 1 << 20;

    /// A server whose disk is this one, of which the next client gets a connection.
    fn serving<T>(disk: &mut [u8], work: impl FnOnce(&mut NbdClient) -> T) -> (io::Result<()>, T) {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("nbd");
        let listener = UnixListener::bind(&socket).unwrap();
        std::thread::scope(|scope| {
            let server = scope.spawn(move || {
                let exports = [
                    Export { name: "disk1".into(), bytes: 7 },
                    Export { name: "disk".into(), bytes: DISK_BYTES },
                ];
                let (number, mut server) =
                    NbdServer::negotiate(listener.accept().unwrap().0, &exports)?.unwrap();
                assert_eq!(number, 1);
                server.serve(&mut |change| {
                    let Change::Write { request, .. } = change else { return Ok(()) };
                    let (head, content) = request.split_at(REQUEST_BYTES);
                    let head = Request::decode(head)?;
                    let range = head.offset as usize..(head.offset + u64::from(head.bytes)) as usize;
                    match head.kind {
                        WRITE => disk[range].copy_from_slice(content),
                        _ => disk[range].fill(0),
                    }
                    Ok(())
                })
            });
            let mut client = NbdClient::connect(&socket, "disk", None, Duration::from_secs(5)).unwrap();
            assert_eq!(client.disk_bytes(), Some(DISK_BYTES));
            let done = work(&mut client);
            drop(client);
            (server.join().unwrap(), done)
        })
    }

    fn request(kind: u16, offset: u64, bytes: u32) -> Request {
        Request { flags: 0, kind, cookie: 1, offset, bytes }
    }

    fn write(offset: u64, content: &[u8]) -> Vec<u8> {
        [&request(WRITE, offset, content.len() as u32).encode()[..], content].concat()
    }

    #[test]
    fn what_a_client_wrote_is_repeated_in_order() {
        let mut random = fastrand::Rng::with_seed(1);
        let (mut expected, mut requests) = (vec![0; DISK_BYTES as usize], Vec::new());
        for number in 0..2000u32 {
            let bytes = random.u32(1..5000);
            let offset = random.u64(0..=DISK_BYTES - u64::from(bytes));
            let range = offset as usize..offset as usize + bytes as usize;
            if number % 5 == 0 {
                requests.extend(request([TRIM, WRITE_ZEROES][number as usize % 2], offset, bytes).encode());
                expected[range].fill(0);
            } else {
                requests.extend(write(offset, &vec![number as u8; bytes as usize]));
                expected[range].fill(number as u8);
            }
        }
        let mut disk = vec![0; DISK_BYTES as usize];
        let (served, ()) = serving(&mut disk, |client| {
            client.replay(&requests).unwrap();
            client.flush().unwrap();
        });
        assert_eq!(served.unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
        assert!(disk == expected);
    }

    #[test]
    fn requests_that_do_not_fit_are_not_repeated() {
        let whole = write(0, &[1; 100]);
        for requests in [
            &whole[..whole.len() - 1],
            &whole[1..],
            &write(DISK_BYTES - 1, &[1; 2]),
            &request(WRITE_ZEROES, u64::MAX, 1).encode(),
            &request(super::super::READ, 0, 1).encode(),
            &request(WRITE, 0, u32::MAX).encode(),
        ] {
            let mut disk = vec![0; DISK_BYTES as usize];
            let (_, replayed) = serving(&mut disk, |client| client.replay(requests));
            assert_eq!(replayed.unwrap_err().kind(), io::ErrorKind::InvalidData, "{requests:?}");
            assert!(disk.iter().all(|byte| *byte == 0));
        }
    }

    #[test]
    fn a_client_that_sends_something_else_is_left() {
        let mut disk = vec![0; DISK_BYTES as usize];
        for sent in [&[0u8; REQUEST_BYTES][..], &request(WRITE, 0, u32::MAX).encode()] {
            let (served, ()) = serving(&mut disk, |client| client.send(sent).unwrap());
            assert_eq!(served.unwrap_err().kind(), io::ErrorKind::InvalidData);
        }
        // Reads, and what is beyond the end, are not done.
        for refused in [request(super::super::READ, 0, 1), request(TRIM, DISK_BYTES, 1)] {
            let (served, replied) = serving(&mut disk, |client| {
                client.send(&refused.encode()).unwrap();
                client.await_written(1)
            });
            assert_eq!(served.unwrap_err().kind(), io::ErrorKind::InvalidInput);
            assert_eq!(replied.unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
        }
    }
}
