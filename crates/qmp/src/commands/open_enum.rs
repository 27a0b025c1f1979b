//! Enums of QEMU that grow with its versions.

/// A newtype over the enum's text, with constants for the values we know. A value we do not know is kept
/// unchanged.
macro_rules! open_enum {
    ($(#[$doc:meta])* $name:ident { $($konst:ident = $text:literal),* $(,)? }) => {
        $(#[$doc])*
        #[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
        #[serde(transparent)]
        pub struct $name(std::borrow::Cow<'static, str>);

        impl $name {
            $(
                #[doc = concat!("QEMU's `", $text, "`.")]
                pub const $konst: Self = Self(std::borrow::Cow::Borrowed($text));
            )*

            /// Creates any value, also one without a constant.
            pub fn new(text: impl Into<String>) -> Self {
                Self(std::borrow::Cow::Owned(text.into()))
            }

            /// QEMU's text.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(&self.0)
            }
        }
    };
}
pub(super) use open_enum;
