//! An image that another host sends, and whether its guest would run here.

use towline_channel::Address;
use towline_compat::facts::Subject;
use towline_compat::{Facts, evaluate};
use towline_qmp as qmp;

use super::guest::of_two_hosts;
use crate::plan::{self, Destination, Observer, Tls};
use crate::qemu::Qemu;

/// Where another host sends an image.
#[derive(Debug)]
#[non_exhaustive]
pub struct Departure {
    /// Where it listens.
    pub address: Address,
    /// Keys of both ends.
    pub tls: Tls,
    /// Facts about the guest; none of an image in a store.
    pub(super) facts: Option<Facts>,
}

impl Departure {
    /// Refuses a guest that would not run in the QEMU of this destination, and passes other findings on as notices.
    ///
    /// # Errors
    /// [`plan::Error::DoesNotFit`]; the QEMU does not reply.
    pub fn check(
        &self,
        destination: &Destination,
        lanes: usize,
        observer: &dyn Observer,
    ) -> Result<(), plan::Error> {
        let (Some(guest), Destination::Qmp(socket)) = (&self.facts, destination) else { return Ok(()) };
        let mut qemu = Qemu::inspect(socket, &qmp::Options::default())?;
        let here = Subject::Qemu(Box::new(qemu.compat_facts()?)).into();
        let name = || format!("QEMU on {}", socket.display());
        plan::report_findings(&evaluate(&of_two_hosts(guest, &here, lanes)), name, observer)
    }
}
