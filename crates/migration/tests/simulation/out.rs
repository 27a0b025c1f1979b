//! Data that a thread of the engine would be sending: bytes, and pages that are read when they are sent, as
//! from live memory.

use std::collections::VecDeque;

use super::guest::{Guest, PAGE, content};
use super::net::{Gone, Net, Port};

#[derive(Debug)]
pub(crate) struct Out {
    pub(crate) port: Port,
    items: VecDeque<Item>,
    /// Bytes of the first item that went.
    sent: usize,
    /// The page that is being sent, and which version of it.
    shown: Option<(usize, u64, [u8; PAGE])>,
}

#[derive(Debug)]
enum Item {
    Bytes(Vec<u8>),
    Page(usize),
}

impl Out {
    pub(crate) fn new(port: Port) -> Self {
        Self { port, items: VecDeque::new(), sent: 0, shown: None }
    }

    pub(crate) fn bytes(&mut self, bytes: Vec<u8>) {
        if !bytes.is_empty() {
            self.items.push_back(Item::Bytes(bytes));
        }
    }

    /// A page of the guest's memory, with its content at the time of sending.
    pub(crate) fn page(&mut self, page: usize) {
        self.items.push_back(Item::Page(page));
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.items.is_empty()
    }

    /// Sends what fits; whether anything went.
    pub(crate) fn pump(&mut self, net: &mut Net, guest: Option<&Guest>) -> Result<bool, Gone> {
        let mut any = false;
        while let Some(item) = self.items.front() {
            let bytes = match item {
                Item::Bytes(bytes) => &bytes[..],
                Item::Page(page) => {
                    let version = guest.expect("only a source has pages").version(*page);
                    if self.shown.is_none_or(|(shown, of, _)| (shown, of) != (*page, version)) {
                        self.shown = Some((*page, version, content(*page, version)));
                    }
                    let (_, _, bytes) = self.shown.as_ref().expect("just set");
                    &bytes[..]
                }
            };
            let sent = net.send(self.port, &bytes[self.sent..])?;
            if sent == 0 {
                break;
            }
            any = true;
            self.sent += sent;
            if self.sent < bytes.len() {
                break;
            }
            self.sent = 0;
            self.items.pop_front();
        }
        Ok(any)
    }
}
