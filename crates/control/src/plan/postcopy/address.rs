//! An address of somebody else's QEMU, which takes a guest by postcopy.

use towline_channel::Address;

use super::super::context::Run;
use super::super::destination::Fate;
use super::super::error::Error;
use super::super::request::PostcopyOptions;
use super::end::End;

/// See the module's text.
pub(super) struct AddressEnd(pub(super) Address);

impl End for AddressEnd {
    fn listen(&mut self, _: PostcopyOptions, _: bool) -> Result<Address, Error> {
        Ok(self.0.clone())
    }

    /// Nobody to ask: it listens again when somebody has told it to.
    fn fate(&mut self) -> Result<Fate, Error> {
        Ok(Fate::Listens(self.0.clone()))
    }

    fn wait_for_help(&mut self, why: &towline_migration::Error, run: &Run<'_>) {
        let address = &self.0;
        run.observer.notice(&format!(
            "{why}; the guest waits at its destination; {address} is tried again and again: if its QEMU does not listen there any more, tell it `migrate-recover` with that uri"
        ));
    }
}
