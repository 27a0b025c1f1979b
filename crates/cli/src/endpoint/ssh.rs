//! `ssh:[USER@]HOST[:PORT][/PLACE]`: a place on another host.

use std::fmt;

use towline_control::remote::{Place, SshTarget};

/// Another host, and the place of a guest there.
#[derive(Debug, Clone)]
pub(crate) struct SshEndpoint {
    pub(crate) target: SshTarget,
    /// Without the command line of a guest that is started there.
    pub(crate) place: Place,
}

impl fmt::Display for SshEndpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ssh:{}", self.target)?;
        match &self.place {
            Place::Guest(guest) if guest.name.is_empty() => Ok(()),
            Place::Guest(guest) => write!(f, "/{}", guest.name),
            Place::Qmp(path) => write!(f, "/qmp:{}", path.display()),
            Place::File(path) => write!(f, "/file:{}", path.display()),
            Place::Store(location) => write!(f, "/{location}"),
        }
    }
}
