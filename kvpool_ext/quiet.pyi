from typing import final

@final
class Quiet: ...
