"""Exchange engine on asyncio: takes elements, routes them, pushes copies. Does not use Django."""
